// The log of a job: followed as it grows, and searched.
"use strict";

(() => {
  const log = document.getElementById("log");
  if (!log) return;
  const find = document.getElementById("log-find");
  const follow = document.getElementById("log-follow");
  const found = document.getElementById("log-found");
  const MAX_CHARACTERS = 2_000_000;
  const MAX_SHOWN = 5000;
  let offset = Number(log.dataset.offset);
  let text = "";
  let isReading = false;
  let isFirst = true;

  function show() {
    const word = find.value.trim().toLowerCase();
    const lines = text.split("\n");
    const chosen = word ? lines.filter((line) => line.toLowerCase().includes(word)) : lines;
    const atEnd = follow.checked;
    log.replaceChildren(...chosen.slice(-MAX_SHOWN).flatMap((line) => marked(line, word)));
    if (!text) log.textContent = "No log yet.";
    found.textContent = word ? `${chosen.length} of ${lines.length} lines have “${find.value.trim()}”` : "";
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  function marked(line, word) {
    const at = word ? line.toLowerCase().indexOf(word) : -1;
    if (at < 0) return [`${line}\n`];
    const mark = document.createElement("mark");
    mark.textContent = line.slice(at, at + word.length);
    return [line.slice(0, at), mark, `${line.slice(at + word.length)}\n`];
  }

  async function read() {
    if (isReading || (!follow.checked && text) || document.hidden) return;
    isReading = true;
    try {
      for (;;) {
        const answer = await fetch(`${log.dataset.url}?offset=${offset}`, { cache: "no-store" });
        if (!answer.ok) break;
        const more = await answer.text();
        const next = Number(answer.headers.get("Evenkeel-Next-Offset"));
        // Reading began in the middle of a line.
        const begin = isFirst && offset > 0 ? more.indexOf("\n") + 1 : 0;
        isFirst = false;
        // Another attempt's log has begun.
        if (next < offset) text = "";
        const isSame = next === offset;
        offset = next;
        if (isSame) break;
        text = (text + more.slice(begin)).slice(-MAX_CHARACTERS);
      }
    } catch {
      // The frame shows that the service does not answer.
    }
    isReading = false;
    show();
  }

  document.getElementById("log-search").addEventListener("submit", (event) => event.preventDefault());
  find.addEventListener("input", show);
  follow.addEventListener("change", read);
  setInterval(read, 2000);
  read();
})();
