// The neighbours of an item in one version, or in two versions side by side; a click on one shows its neighbours.
"use strict";

(() => {
  async function ask(url, id, k, version) {
    // Ids are sent as text, which the API accepts for both id types: numbers beyond 2^53 would be rounded.
    const body = JSON.stringify({ id, k, version });
    const answer = await fetch(url, { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const said = await answer.text();
    if (!answer.ok) throw new Error(JSON.parse(said).detail);
    // Read integer ids as text, because JSON.parse would round those beyond 2^53.
    return JSON.parse(said.replace(/"id":\s*(-?\d+)/g, '"id":"$1"'));
  }

  function column(found, others) {
    const part = document.createElement("div");
    const title = document.createElement("h3");
    title.textContent = found.version + (found.exact ? "" : " (approximate, from an index)");
    const list = document.createElement("ol");
    list.className = "neighbors";
    for (const item of found.items) {
      const entry = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.className = "link";
      button.dataset.item = item.id;
      button.textContent = item.id;
      const cosine = document.createElement("span");
      cosine.className = "number";
      cosine.textContent = item.cosine.toFixed(4);
      entry.append(button, cosine);
      if (others && !others.has(item.id)) {
        entry.className = "new";
        entry.append(Object.assign(document.createElement("span"), { className: "quiet", textContent: "only here" }));
      }
      list.append(entry);
    }
    part.append(title, list);
    return part;
  }

  async function search(form) {
    const result = document.getElementById("neighbors-found");
    const { wanted, version, other } = form.elements;
    const versions = [version.value, other.value].filter(Boolean);
    try {
      const found = await Promise.all(versions.map((one) => ask(form.dataset.url, wanted.value.trim(), 10, one)));
      const ids = found.map((one) => new Set(one.items.map((entry) => entry.id)));
      result.replaceChildren(...found.map((one, number) => column(one, found.length > 1 ? ids[1 - number] : null)));
    } catch (error) {
      const problem = document.createElement("p");
      problem.className = "problem";
      problem.textContent = error.message;
      result.replaceChildren(problem);
    }
  }

  document.addEventListener("submit", (event) => {
    if (event.target.id !== "neighbors") return;
    event.preventDefault();
    search(event.target);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-item]");
    const form = document.getElementById("neighbors");
    if (!button || !form) return;
    form.elements.wanted.value = button.dataset.item;
    search(form);
  });
})();
