// Plots: uPlot with what it lacks for readers without a mouse: arrow keys, words for the plot, a table of its data.
"use strict";
Report.plot = (() => {
  const { make, draw, number, bytes, day, moment } = Report;
  const drawn = new Set(); // functions that draw a plot again, in other colours
  const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  const HEIGHT = 260;
  const MARK_ROWS = 3; // of words above the plot
  const MARK_HEIGHT = 14;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const KINDS = {
    time: { tick: day, words: moment },
    bytes: { tick: bytes, words: bytes },
    step: { tick: number, words: (value) => `step ${value}` },
  };

  const key = (series) => {
    const paint = `var(--${series.colour})`;
    const line = draw("path", { d: "M0 5H24", stroke: paint, "stroke-width": 2, "stroke-dasharray": series.dash ? series.dash.join(" ") : null });
    const dot = draw("circle", { cx: 12, cy: 5, r: 3.2, fill: series.hollow ? "var(--page)" : paint, stroke: paint, "stroke-width": 1.5 });
    const parts = series.band ? [draw("rect", { x: 0, y: 0, width: 24, height: 10, fill: "var(--band)" })]
      : [series.line === false ? null : line, series.points || series.hollow ? dot : null];
    return make("span", {}, draw("svg", { viewBox: "0 0 24 10", "aria-hidden": "true" }, parts), series.name);
  };

  const seriesOptions = (series) => ({
    label: series.name,
    stroke: series.line === false ? "transparent" : colour(series.colour),
    width: series.width || 1.6,
    dash: series.dash,
    spanGaps: true,
    scale: "y",
    points: series.points || series.hollow
      ? { show: true, size: 6, width: 1.4, stroke: colour(series.colour), fill: series.hollow ? colour("page") : colour(series.colour) }
      : { show: false },
  });

  // Vertical lines with words, such as the first run with another driver.
  const marks = (spec) => (plot) => {
    const context = plot.ctx;
    context.save();
    context.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    context.textBaseline = "top";
    context.textAlign = "left";
    const rows = []; // where each row of words ends
    for (const mark of spec.marks || []) {
      const at = plot.valToPos(mark.x, "x", true);
      context.strokeStyle = colour(mark.colour || "strong-line");
      context.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      context.beginPath();
      context.moveTo(at, plot.bbox.top);
      context.lineTo(at, plot.bbox.top + plot.bbox.height);
      context.stroke();
      const width = context.measureText(mark.words).width;
      const right = at + width + 6 * devicePixelRatio > plot.bbox.left + plot.bbox.width;
      const left = right ? at - width - 4 * devicePixelRatio : at + 4 * devicePixelRatio;
      let row = rows.findIndex((end) => left > end);
      if (row < 0) row = Math.min(rows.length, MARK_ROWS - 1);
      rows[row] = left + width + 8 * devicePixelRatio;
      context.fillStyle = colour(mark.colour || "soft");
      context.fillText(mark.words, left, MARK_HEIGHT * row * devicePixelRatio);
    }
    context.restore();
  };

  const options = (spec, width, onCursor) => {
    const kind = KINDS[spec.kind];
    const axis = { stroke: colour("soft"), font: FONT, grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1, size: 4 } };
    const x = spec.kind === "bytes"
      ? { distr: 3, log: 2, time: false }
      : { time: false, range: (_plot, low, high) => (low === high ? [low - 43200, high + 43200] : [low, high]) };
    return {
      width,
      height: HEIGHT,
      padding: [spec.marks && spec.marks.length ? MARK_HEIGHT * Math.min(MARK_ROWS, spec.marks.length) + 4 : 10, 16, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: spec.kind !== "bytes", y: false }, points: { size: 8 } },
      scales: { x, y: { range: (_plot, low, high) => spec.range ? spec.range(low, high) : padded(low, high) } },
      axes: [
        { ...axis, values: (_plot, splits) => splits.map((value) => (value === null ? "" : kind.tick(value))), space: 70, ...(spec.kind === "bytes" ? { filter: spaced } : {}) },
        { ...axis, size: 62, values: (_plot, splits) => splits.map((value) => (value === null ? "" : number(value))) },
      ],
      series: [{}, ...spec.series.map(seriesOptions)],
      bands: spec.bands ? spec.bands.map((pair) => ({ series: pair, fill: colour("band") })) : [],
      hooks: { draw: [marks(spec)], setCursor: [onCursor] },
    };
  };
  // Every second, third, … size has its words where there is no room for all.
  const LABEL = 62;
  const spaced = (plot, splits) => {
    const every = Math.ceil((splits.length * LABEL * devicePixelRatio) / plot.bbox.width);
    return splits.map((value, at) => (at % every ? null : value));
  };
  const padded = (low, high) => {
    const room = (high - low || Math.abs(high) || 1) * 0.12;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  };

  // The values at one place of the x axis, in words.
  const words = (spec, at) => {
    const values = spec.series
      .filter((series) => series.values[at] !== null && series.values[at] !== undefined && !series.quiet)
      .map((series) => `${series.name} ${number(series.values[at])}`);
    const more = spec.more ? spec.more(at) : "";
    return `${KINDS[spec.kind].words(spec.x[at])}: ${values.join(", ")} ${spec.unit}${more ? ` · ${more}` : ""}`;
  };

  const table = (spec) => {
    const rows = spec.x.map((value, at) => make("tr", {}, make("td", {}, KINDS[spec.kind].words(value)),
      spec.series.map((series) => make("td", { class: "number" }, number(series.values[at])))));
    return make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, spec.across),
      spec.series.map((series) => make("th", { scope: "col", class: "number" }, `${series.name} (${spec.unit})`)))), make("tbody", {}, rows));
  };

  const asTable = (spec) => {
    const part = make("details", {}, make("summary", {}, "The same as a table"));
    part.addEventListener("toggle", () => {
      if (part.open && part.childElementCount === 1) {
        part.append(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${spec.name}` }, table(spec)));
      }
    });
    return part;
  };

  const redraw = () => { for (const again of [...drawn]) again(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let seen = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== seen) { seen = innerWidth; redraw(); } });
  // Paper is white.
  addEventListener("beforeprint", () => { document.documentElement.classList.add("printing"); redraw(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("printing"); redraw(); });

  // Draw a plot into an element, in place of what is there; drawn when it is about to be seen.
  return (holder, spec) => {
    const canvas = make("div", { class: "canvas", tabindex: 0, role: "group", "aria-label": `Plot of ${spec.name}: ${spec.summary || ""} Left and right arrow keys read its points.` });
    const readout = make("p", { class: "readout", "aria-live": "polite" }, "Point at the plot, or focus it and press the arrow keys, to read its points.");
    const caption = make("figcaption", {}, make("span", { class: "name" }, spec.name), " ", spec.simulated ? Report.simulated() : null, " ", make("span", { class: "note" }, spec.note || ""));
    holder.replaceChildren(make("figure", { class: "plot", style: "margin: 0" }, caption, canvas, readout,
      make("div", { class: "keys" }, spec.series.filter((series) => !series.quiet || series.band).map(key)), asTable(spec)));

    let plot = null;
    const again = () => {
      if (!canvas.isConnected) { drawn.delete(again); return; }
      const width = Math.max(240, holder.clientWidth);
      if (plot) plot.destroy();
      const onCursor = (self) => { if (self.cursor.idx !== null && self.cursor.idx !== undefined) readout.textContent = words(spec, self.cursor.idx); };
      plot = new uPlot(options(spec, width, onCursor), [spec.x, ...spec.series.map((series) => series.values)], canvas);
    };
    let at = spec.x.length;
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined || !plot) return;
      event.preventDefault();
      at = Math.min(spec.x.length - 1, Math.max(0, at + step));
      plot.setCursor({ left: plot.valToPos(spec.x[at], "x"), top: HEIGHT / 3 });
      readout.textContent = words(spec, at);
    });
    drawn.add(again);
    Report.whenSeen(canvas, again);
    canvas.style.minHeight = `${HEIGHT}px`;
  };
})();
