// The first answer: which machine is shown, and whether the page and its certificates are still young enough.
"use strict";
(() => {
  const PAGE_AGE_S = 36 * 3600;
  const chooser = document.getElementById("machine");
  const machines = [...document.querySelectorAll(".machine")];
  if (chooser) {
    const show = () => machines.forEach((part) => { part.hidden = part.dataset.machine !== chooser.value; });
    chooser.addEventListener("change", show);
    show(); // a browser keeps the choice over a reload
  }

  const made = Date.parse(document.querySelector(".made time").dateTime) / 1000;
  const now = Date.now() / 1000;
  if (now - made > PAGE_AGE_S) {
    const note = document.getElementById("stale");
    note.textContent = `This page is ${Math.floor((now - made) / 86400)} days old. What it says may no longer hold: stackcheck report`;
    note.hidden = false;
  }
  // A meta element would refresh without a way to stop it (WCAG 2.2.1).
  const refresh = document.getElementById("refresh");
  if (refresh) setInterval(() => { if (refresh.checked) location.reload(); }, refresh.dataset.seconds * 1000);

  // Ages grow while a page hangs on a wall, and a node that was in time becomes late.
  const steps = [[86400, "d"], [3600, "h"], [60, "min"]];
  const tick = () => {
    for (const age of document.querySelectorAll(".wall .age")) {
      const seconds = Math.max(0, Date.now() - Date.parse(age.dateTime)) / 1000;
      const [length, unit] = steps.find(([least]) => seconds >= least) || steps[2];
      age.textContent = `${Math.floor(seconds / length)} ${unit}`;
      const row = age.closest("tr.passed");
      if (!row || !age.parentNode.matches(".last") || seconds <= Number(age.closest("table").dataset.late)) continue;
      row.className = "late";
      age.previousSibling.textContent = " late ";
      age.parentNode.querySelector(".icon").replaceWith(Report.icon("expired"));
      const note = document.getElementById("late");
      note.textContent = `Late since this page was made: ${document.querySelectorAll(".wall tr.late").length} in all`;
      note.hidden = false;
    }
  };
  tick();
  setInterval(tick, 60e3);
  for (const offer of document.querySelectorAll(".offer.valid")) {
    if (Number(offer.dataset.expires) > now) continue;
    offer.classList.replace("valid", "lost");
    offer.querySelector(".standing").textContent = "Expired since this page was made; certified";
    offer.querySelector(".icon").replaceWith(Report.icon("expired"));
    const command = offer.querySelector(".command");
    if (command) command.remove();
  }
  // A sentence that counts expired certificates as valid would be wrong.
  for (const machine of machines) {
    const answer = machine.querySelector(".answer.good");
    const left = machine.querySelectorAll(".offer.valid").length;
    const strong = answer && answer.querySelector("strong");
    if (!strong || left === Number.parseInt(strong.textContent, 10)) continue;
    strong.textContent = left ? `${left} of ${strong.textContent}` : "No image";
    if (!left) {
      answer.className = "answer bad";
      answer.querySelector(".icon").replaceWith(Report.icon("failed"));
      answer.querySelector("span").lastChild.textContent += " The certificates have expired.";
    }
  }

  if (navigator.clipboard) {
    for (const button of document.querySelectorAll(".copy")) {
      button.hidden = false;
      button.setAttribute("aria-label", `Copy: ${button.previousElementSibling.textContent}`);
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(button.previousElementSibling.textContent);
        button.textContent = "Copied";
      });
    }
  }
})();
