// Every run, newest first, a page at a time; the evidence of a run on demand.
"use strict";
(() => {
  const { block, make, icon, number, moment, run } = Report;
  const table = document.getElementById("run-table");
  if (!table) return;
  const PAGE = 25;
  const find = document.getElementById("find");
  const verdict = document.getElementById("verdict");
  const more = document.getElementById("more-runs");
  const WORDS = { P: ["passed", "passed"], F: ["failed", "failed"], U: ["unfit", "machine unfit"] };
  const body = make("tbody", {});
  let found = [];
  let shown = 0;

  const details = (at) => (block("data-details") || {})[at];
  const readings = (item) => make("table", {}, make("thead", {}, make("tr", {},
    ["Check", "Seconds", "Clock, median (MHz)", "lowest", "Power, highest (W)", "Temperature, highest (°C)", "Slowed by"].map((title, at) => make("th", { scope: "col", class: at && at < 6 ? "number" : null }, title)))),
    make("tbody", {}, item.readings.map((line) => make("tr", {}, line.map((value, at) =>
      make("td", { class: at && at < 6 ? "number" : null }, at && at < 6 ? number(value) : value || "nothing"))))));
  const evidence = (item, one) => make("tr", { class: "evidence" }, make("td", { colspan: 8 },
    make("p", {}, "Record ", make("code", {}, one.record), one.image ? [", image ", make("code", {}, one.image)] : null),
    (block("data-runs").why[one.at] || []).map((line) => make("p", { class: "why" }, line)),
    item && item.failures.length ? item.failures.slice(0, 10).map(([check, outcome, , reason]) => make("details", {}, make("summary", {}, make("code", {}, check), ` ${outcome}`), make("pre", {}, reason.join("\n")))) : null,
    item && item.readings.length ? readings(item)
      : make("p", { class: "why" }, item ? "No check of this run watched clocks and power." : "This page carries the evidence of the newest runs only; the record has it: stackcheck history")));

  const row = (at) => {
    const one = run(at);
    const [state, words] = WORDS[one.status];
    const line = make("tr", {},
      make("td", {}, moment(one.started)), make("td", {}, icon(state), " ", words),
      make("td", { class: "stack" }, Report.title(one.stack), " ", one.simulated ? Report.simulated() : null),
      make("td", {}, `${one.count} x ${one.device}`), make("td", {}, one.driver || "–"), make("td", {}, one.tier), make("td", {}, make("code", {}, one.node)));
    const button = make("button", { type: "button", "aria-expanded": "false", click: () => {
      const open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      if (open) line.nextSibling.remove();
      else line.after(evidence(details(at), one));
    } }, "Evidence");
    button.setAttribute("aria-label", `Evidence of the run of ${moment(one.started)}`);
    line.append(make("td", {}, button));
    return line;
  };

  const page = () => {
    const next = found.slice(shown, shown + PAGE);
    body.append(...next.map(row));
    shown += next.length;
    more.hidden = shown >= found.length;
    more.textContent = `Show ${Math.min(PAGE, found.length - shown)} more of ${found.length}`;
  };
  const search = () => {
    const { names, rows } = block("data-runs");
    const text = find.value.trim().toLowerCase();
    const hit = (list) => list.map((name) => name.toLowerCase().includes(text));
    const [stacks, devices, drivers, nodes] = [names.stack, names.device, names.driver, names.node].map(hit);
    found = [];
    for (let at = rows.length - 1; at >= 0; at -= 1) {
      const line = rows[at];
      const named = !text || stacks[line[2]] || devices[line[3]] || drivers[line[5]] || nodes[line[6]];
      if (named && (!verdict.value || line[8] === verdict.value)) found.push(at);
    }
    document.getElementById("found").textContent = `${found.length} runs`;
    shown = 0;
    body.replaceChildren();
    page();
  };

  Report.whenSeen(table.closest("section"), () => {
    table.append(make("thead", {}, make("tr", {}, ["Started (UTC)", "Verdict", "Stack", "Devices", "Driver", "Tier", "Node", "Evidence"].map((title) => make("th", { scope: "col" }, title)))), body);
    search();
  });
  let waiting = 0;
  find.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(search, 120); });
  verdict.addEventListener("change", search);
  more.addEventListener("click", page);
})();
