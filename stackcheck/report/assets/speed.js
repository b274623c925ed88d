// The third answer: the figures of one stack against their bounds, ceilings and last month, and over the nights.
"use strict";
(() => {
  const { block, make, draw, number, percent } = Report;
  const chooser = document.getElementById("group");
  if (!chooser) return;
  const ROWS = 12;
  const STEPS = 4; // changes of level that a plot names
  const table = document.getElementById("figures");
  const more = document.getElementById("more-figures");
  let all = false;
  let chosen = null;

  const last = (values) => { for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null) return values[at]; return null; };
  const margin = (series) => {
    if (series.bound === null || series.direction === null) return null;
    const share = last(series.values) / series.bound - 1;
    return series.direction === "min" ? share : -share;
  };
  const change = (series) => (series.month ? last(series.values) / series.month - 1 : null);
  const isWorse = (series, share) => share !== null && (series.direction === "max" ? share > 0.02 : share < -0.02);

  // The newest value as a bar; the tick is its bound, the track ends at the ceiling.
  const bar = (series) => {
    const value = last(series.values);
    const end = Math.max(series.ceiling || 0, (series.bound || 0) * 1.1, value * 1.05) || 1;
    const out = margin(series) !== null && margin(series) < 0;
    const tick = series.bound === null ? null : draw("path", { class: "tick", d: `M${(176 * series.bound) / end} 0V18` });
    return draw("svg", { class: "bar", viewBox: "0 0 176 18", preserveAspectRatio: "none", "aria-hidden": "true" },
      draw("rect", { class: "track", x: 0, y: 4, width: 176, height: 10, rx: 2 }),
      draw("rect", { class: out ? "fill out" : "fill", x: 0, y: 4, width: Math.max(1, (176 * value) / end), height: 10, rx: 2 }), tick);
  };

  const group = () => block(`data-series-${chooser.value}`);
  const sorted = () => {
    const rank = (series) => { const share = margin(series); return share === null ? Infinity : share; };
    return [...group().series].filter((series) => last(series.values) !== null).sort((one, other) => rank(one) - rank(other));
  };

  const row = (series) => {
    const share = margin(series);
    const month = change(series);
    const button = make("button", { type: "button", "aria-pressed": String(series === chosen), click: () => choose(series, true) }, Report.figure(series.name));
    return make("tr", { class: series === chosen ? "chosen" : null },
      make("td", {}, button, make("span", { class: "check" }, series.check)),
      make("td", { class: "number" }, `${number(last(series.values))} ${series.unit}`),
      make("td", { class: "bars" }, bar(series)),
      make("td", { "data-label": "margin to its bound", class: `number${share !== null && share < 0 ? " worse" : ""}` }, share === null ? "no bound" : `${percent(share, true)}`),
      make("td", { "data-label": "of the ceiling", class: "number" }, series.ceiling ? percent(last(series.values) / series.ceiling) : "–"),
      make("td", { "data-label": "in a month", class: `number${isWorse(series, month) ? " worse" : ""}` }, percent(month, true)));
  };

  const rows = () => {
    const found = sorted();
    const titles = ["Figure", "Newest", "Against bound and ceiling", "Margin to bound", "Of the ceiling", "In a month"];
    table.replaceChildren(
      make("thead", {}, make("tr", {}, titles.map((title, at) => make("th", { scope: "col", class: [1, 3, 4, 5].includes(at) ? "number" : null }, title)))),
      make("tbody", {}, (all ? found : found.slice(0, ROWS)).map(row)));
    more.hidden = found.length <= ROWS;
    more.textContent = all ? "Show fewer figures" : `Show all ${found.length} figures`;
  };

  const answer = () => {
    const found = sorted();
    const judged = found.filter((series) => margin(series) !== null);
    const out = judged.filter((series) => margin(series) < 0);
    const place = document.getElementById("speed-answer");
    const { simulated } = block("data-groups")[chooser.value];
    const mark = simulated === "none" ? null : [" ", Report.simulated()];
    if (!judged.length) {
      place.className = "answer none";
      place.replaceChildren(make("span", {}, "No figure here has a bound to be judged by.", mark));
      return;
    }
    const worse = found.filter((series) => isWorse(series, change(series))).length;
    const since = worse ? ` ${worse} ${worse === 1 ? "is" : "are"} more than 2 % worse than a month ago.` : "";
    const words = out.length ? `${out.length} of ${judged.length} figures` : `All ${judged.length} figures`;
    place.className = `answer ${out.length ? "bad" : "good"}`;
    place.replaceChildren(Report.icon(out.length ? "failed" : worse ? "unfit" : "certified"),
      make("span", {}, make("strong", {}, words), out.length ? " are outside their bounds." : " keep their bounds.", since, mark));
    const { warned } = block("data-groups")[chooser.value];
    document.getElementById("steps").replaceChildren(...warned.map(([day, loss, nodes, figures]) => make("li", {},
      `A step since ${Report.day(day)}: up to ${percent(loss)} worse in ${figures} ${figures === 1 ? "figure" : "figures"}, on ${nodes.length === 1 ? "node" : "nodes"} ${nodes.join(", ")}. It warns; it decides nothing.`)));
  };

  const nights = (series) => {
    const runs = group().runs.map(Report.run);
    const real = runs.map((run, at) => (run.simulated ? null : series.values[at]));
    const made = runs.map((run, at) => (run.simulated ? series.values[at] : null));
    const shown = [];
    if (real.some((value) => value !== null)) shown.push({ name: "measured", values: real, colour: "series", points: true, line: false });
    if (made.some((value) => value !== null)) shown.push({ name: "simulated", values: made, colour: "sim", hollow: true, line: false });
    if (series.bound !== null) shown.push({ name: series.direction === "max" ? "bound (at most)" : "bound (at least)", values: runs.map(() => series.bound), colour: "bound", dash: [6, 4] });
    if (series.month) shown.push({ name: "last month", values: runs.map(() => series.month), colour: "ceiling", dash: [2, 3] });
    const known = new Set([runs[0].driver]);
    const drivers = runs.filter((run) => run.driver && !known.has(run.driver) && known.add(run.driver)).map((run) => ({ x: run.started, words: `first with driver ${run.driver}` }));
    const steps = series.shifts.slice(-STEPS).map(([at, loss, node]) => ({ x: runs[at].started, words: `${loss > 0 ? "worse" : "better"} by ${percent(Math.abs(loss))} on ${node.slice(0, 6)}`, colour: loss > 0 ? "bad" : "good" }));
    Report.plot(document.getElementById("nights"), {
      name: Report.figure(series.name), unit: series.unit, kind: "time", across: "run",
      note: `${series.unit}, ${runs.length} runs${series.ceiling ? `, ceiling ${number(series.ceiling)}` : ""}`,
      summary: `${number(last(series.values))} ${series.unit} in the newest run, bound ${number(series.bound)}.`,
      simulated: made.some((value) => value !== null),
      x: runs.map((run) => run.started), series: shown,
      marks: [...drivers, ...steps],
      more: (at) => [runs[at].driver && `driver ${runs[at].driver}`, `node ${runs[at].node}`, { F: "run failed", U: "machine unfit" }[runs[at].status]].filter(Boolean).join(" · "),
    });
  };

  function choose(series, focus) {
    chosen = series;
    rows();
    nights(series);
    if (focus) table.querySelector("tr.chosen button").focus();
  }
  const show = () => {
    all = false;
    answer();
    const found = sorted();
    if (found.length) choose(found[0], false);
    else { table.replaceChildren(); document.getElementById("nights").replaceChildren(make("p", { class: "hint" }, "These runs measured no speed.")); more.hidden = true; }
    dispatchEvent(new CustomEvent("group", { detail: Number(chooser.value) }));
  };
  more.addEventListener("click", () => { all = !all; rows(); });
  chooser.addEventListener("change", show);
  Report.whenSeen(document.getElementById("speed"), show);
})();
