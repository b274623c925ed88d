// What the other scripts share. Texts only ever become text nodes, never markup.
"use strict";
window.Report = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const read = new Map();

  // The JSON of a data block; parsed when it is first asked for. Null when the page has no such block.
  const block = (id) => {
    if (!read.has(id)) {
      const element = document.getElementById(id);
      read.set(id, element ? JSON.parse(element.textContent) : null);
    }
    return read.get(id);
  };

  const fill = (element, attributes, children) => {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (typeof value === "function") element.addEventListener(name, value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return element;
  };
  const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const draw = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  const icon = (state) => draw("svg", { class: `icon ${state}`, viewBox: "0 0 16 16", "aria-hidden": "true" }, draw("use", { href: `#icon-${state}` }));
  const simulated = () => make("span", { class: "simulated" }, "simulated");

  const number = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    const text = size >= 1e5 || (size < 1e-3 && size > 0) ? value.toExponential(2)
      : value.toLocaleString("en", { maximumSignificantDigits: 4, useGrouping: size >= 1e4 });
    return text.replace("-", "\u2212");
  };
  const percent = (share, sign) => {
    if (share === null || share === undefined || !Number.isFinite(share)) return "–";
    const text = `${Math.abs(share * 100).toFixed(1)} %`;
    return (sign ? (share < 0 ? "−" : "+") : share < 0 ? "−" : "") + text;
  };
  const bytes = (count) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
    return `${number(count)} ${units[at]}`;
  };
  // A figure's name with sizes as people say them.
  const figure = (name) => name.replace(/\bbytes=(\d+)/, (_all, count) => bytes(Number(count)));
  const MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(" ");
  const two = (value) => String(value).padStart(2, "0");
  const day = (seconds) => {
    const date = new Date(seconds * 1000);
    return `${two(date.getUTCDate())} ${MONTHS[date.getUTCMonth()]}`;
  };
  const moment = (seconds) => {
    const date = new Date(seconds * 1000);
    return `${day(seconds)} ${date.getUTCFullYear()}, ${two(date.getUTCHours())}:${two(date.getUTCMinutes())}`;
  };

  const FIELDS = ["started", "seconds", "stack", "device", "count", "driver", "node", "tier", "status", "simulated", "record", "image"];
  // One run as an object, by its number in the page.
  const run = (at) => {
    const { names, rows } = block("data-runs");
    const found = { at };
    FIELDS.forEach((field, column) => {
      const value = rows[at][column];
      found[field] = field in names ? names[field][value] : value;
    });
    return found;
  };
  // As page.title_of: old records have the digest alone of an image from elsewhere.
  const title = (text) => text.replace(/(sha256:[0-9a-f]{12})[0-9a-f]{52}/, "$1… (no name was kept)").replace(/^no image/, "no image (pytest alone)");

  // Call `start` when the element is about to be seen or printed, once.
  let printing = false;
  addEventListener("beforeprint", () => { printing = true; });
  addEventListener("afterprint", () => { printing = false; });
  const whenSeen = (element, start) => {
    if (printing) { start(); return; }
    let waits = true;
    const once = () => { if (waits) { waits = false; watch.disconnect(); start(); } };
    const watch = new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) once(); }, { rootMargin: "300px" });
    watch.observe(element);
    addEventListener("beforeprint", once, { once: true });
  };

  return { block, make, draw, icon, simulated, number, percent, bytes, figure, day, moment, run, title, whenSeen };
})();
