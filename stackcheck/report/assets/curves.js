// Bandwidth by message size, and losses in their band.
"use strict";
(() => {
  const { block, make, moment, run, title } = Report;

  const bandwidthOf = (part, curve) => {
    const newest = run(part.run);
    const bounds = curve.bounds.some((value) => value !== null);
    const ceilings = curve.ceilings.some((value) => value !== null);
    const series = [
      ceilings && { name: "ceiling", values: curve.ceilings, colour: "ceiling", points: true, dash: [2, 3] },
      bounds && { name: "bound", values: curve.bounds, colour: "bound", points: true, dash: [6, 4] },
      { name: "measured", values: curve.values, colour: newest.simulated ? "sim" : "series", points: !newest.simulated, hollow: Boolean(newest.simulated) },
    ].filter(Boolean);
    Report.plot(document.getElementById("bandwidth"), {
      name: curve.name, unit: curve.unit, kind: "bytes", across: "message size", x: curve.sizes, series,
      note: `${curve.unit}, ${title(part.title)}, run of ${moment(newest.started)}`,
      summary: `${curve.sizes.length} message sizes.`,
      simulated: newest.simulated,
      bands: bounds && ceilings ? [[1, 2]] : null,
      range: (_low, high) => [0, high * 1.08],
    });
  };

  const chooser = document.getElementById("curve");
  const showBandwidth = (name) => {
    const part = (block("data-curves") || []).find((item) => item.title === name);
    document.getElementById("bandwidth-part").hidden = !part;
    if (!part) return;
    chooser.replaceChildren(...part.curves.map((curve, at) => make("option", { value: at }, curve.name)));
    chooser.onchange = () => bandwidthOf(part, part.curves[Number(chooser.value)]);
    const first = part.curves.findIndex((curve) => curve.bounds.some((value) => value !== null));
    chooser.value = String(Math.max(0, first));
    chooser.onchange();
  };

  const COLOURS = ["series", "good", "odd", "bad", "sim", "link"];
  const DASHES = [undefined, [7, 3], [2, 3], [9, 3, 2, 3]];
  const showLosses = () => {
    const found = block("data-losses");
    document.getElementById("losses-part").hidden = !found || !found.runs.length;
    if (!found || !found.runs.length) return;
    const steps = found.reference.map((_value, at) => at + 1);
    // As a deviation: the curves themselves lie on each other.
    const off = (values) => steps.map((_step, at) => (at < values.length && values[at] !== null ? 100 * (values[at] / found.reference[at] - 1) : null));
    const shown = found.runs.slice(0, 8);
    Report.plot(document.getElementById("losses"), {
      name: "Loss of the small Llama job", unit: "%", kind: "step", across: "step", x: steps,
      note: `how far the loss of each stack's newest run is from the processor's curve at each step, in %, and how far it may be (${found.source})`,
      summary: `${shown.length} runs over ${steps.length} steps.`,
      simulated: shown.some((item) => run(item.run).simulated),
      bands: [[1, 2]],
      series: [
        { name: "upper edge", values: off(found.high), colour: "ceiling", width: 0.6, quiet: true },
        { name: "band", values: off(found.low), colour: "ceiling", width: 0.6, quiet: true, band: true },
        ...shown.map((item, at) => ({
          name: title(item.title) + (run(item.run).simulated ? " (simulated)" : ""), values: off(item.losses),
          colour: COLOURS[at % COLOURS.length], dash: DASHES[at % DASHES.length],
        })),
      ],
    });
  };

  addEventListener("group", (event) => {
    showBandwidth(block("data-groups")[event.detail].title);
    if (!document.getElementById("losses").childElementCount) showLosses();
  });
})();
