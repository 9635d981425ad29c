// Searches of a collection: items for a user, and the neighbours of an item in one version or in two side by side.
// A click on an item shows its neighbours.
"use strict";

(() => {
  const NUM_RECOMMENDED = 20;

  // Ids in a question are text, which the API accepts for both id types: numbers beyond 2^53 would be rounded.
  async function ask(url, question) {
    const body = JSON.stringify(question);
    const answer = await fetch(url, { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const said = await answer.text();
    if (!answer.ok) {
      const problem = JSON.parse(said);
      const remedies = (problem.errors || []).map((one) => one.remedy).filter(Boolean);
      throw new Error([problem.detail, ...remedies].join(" "));
    }
    // Read integer ids as text, because JSON.parse would round those beyond 2^53.
    return JSON.parse(said.replace(/"id":\s*(-?\d+)/g, '"id":"$1"'));
  }

  // A list of items under a title; items that are not among `others`, if they are given, are marked.
  function column(heading, items, figure, others) {
    const part = document.createElement("div");
    const title = document.createElement("h3");
    title.textContent = heading;
    const list = document.createElement("ol");
    list.className = "neighbors";
    for (const item of items) {
      const entry = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.className = "link";
      button.dataset.item = item.id;
      button.textContent = item.id;
      const value = document.createElement("span");
      value.className = "number";
      value.textContent = item[figure].toFixed(4);
      entry.append(button, value);
      if (others && !others.has(item.id)) {
        entry.className = "new";
        entry.append(Object.assign(document.createElement("span"), { className: "quiet", textContent: "only here" }));
      }
      list.append(entry);
    }
    part.append(title, list);
    return part;
  }

  async function neighbors(form) {
    const { wanted, version, other } = form.elements;
    const versions = [version.value, other.value].filter(Boolean);
    const id = wanted.value.trim();
    const found = await Promise.all(versions.map((one) => ask(form.dataset.url, { id, k: 10, version: one })));
    const ids = found.map((one) => new Set(one.items.map((entry) => entry.id)));
    return found.map((one, number) => {
      const heading = one.version + (one.exact ? "" : " (approximate, from an index)");
      return column(heading, one.items, "cosine", found.length > 1 ? ids[1 - number] : null);
    });
  }

  async function recommended(form) {
    const { user, version, unseen } = form.elements;
    const found = await ask(form.dataset.url, {
      users: [user.value.trim()], k: NUM_RECOMMENDED, exclude_seen: unseen.checked, version: version.value,
    });
    const [answer] = found.users;
    if (!answer.found) {
      throw new Error(
        `${found.version} has no user ${answer.id}. It has the users of its job's training rows: check the id, ` +
          "or publish again with rows of this user.",
      );
    }
    if (!answer.items.length) throw new Error(`${found.version} has no item that user ${answer.id} has not seen.`);
    return [column(`${found.version}: user ${answer.id}, by score`, answer.items, "score", null)];
  }

  const SEARCHES = { neighbors, recommend: recommended };

  async function search(form) {
    const result = document.getElementById(`${form.id}-found`);
    try {
      result.replaceChildren(...(await SEARCHES[form.id](form)));
    } catch (error) {
      const problem = document.createElement("p");
      problem.className = "problem";
      problem.textContent = error.message;
      result.replaceChildren(problem);
    }
  }

  document.addEventListener("submit", (event) => {
    if (!(event.target.id in SEARCHES)) return;
    event.preventDefault();
    search(event.target);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-item]");
    const form = document.getElementById("neighbors");
    if (!button || !form) return;
    form.elements.wanted.value = button.dataset.item;
    form.scrollIntoView({ block: "nearest" });
    search(form);
  });
})();
