// Script of every page: signs in and out, refreshes the content from the server, loads slow parts.
"use strict";

const EVERY_SECONDS = 3;

function ago(seconds) {
  const past = seconds >= 0;
  const size = Math.abs(seconds);
  const [count, unit] =
    size < 60 ? [size, " s"] : size < 3600 ? [size / 60, " min"] : size < 172800 ? [size / 3600, " h"] : [size / 86400, " d"];
  return past ? `${Math.floor(count)}${unit} ago` : `in ${Math.ceil(count)}${unit}`;
}

function showTimes() {
  for (const time of document.querySelectorAll("time[datetime]")) {
    time.title ||= time.textContent;
    if ("exact" in time.dataset) {
      time.textContent = new Date(time.dateTime).toLocaleString([], { dateStyle: "full", timeStyle: "long" });
      continue;
    }
    time.textContent = ago((Date.now() - Date.parse(time.dateTime)) / 1000);
  }
}

function startLogin(form) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const problem = document.getElementById("problem");
    const field = form.elements.key;
    problem.hidden = true;
    try {
      const answer = await fetch("/session", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ key: field.value.trim() }),
      });
      if (answer.ok) {
        location.reload();
        return;
      }
      const body = await answer.json().catch(() => ({}));
      problem.textContent = answer.status === 401 ? "The key is unknown, revoked or expired." : body.detail || "Signing in failed.";
    } catch {
      problem.textContent = "The service does not answer.";
    }
    problem.hidden = false;
    field.select();
  });
}

function startContent(content) {
  const live = document.getElementById("live");
  let etag = "";
  let answeredAt = Date.now();
  // The parts as the server sent them: what a visitor has opened or typed since then is not a change.
  let sent = [...content.children].map((part) => part.outerHTML);

  function say(text, late) {
    if (live.textContent !== text) live.textContent = text;
    live.classList.toggle("late", late);
  }

  function exchange(old, fresh) {
    const open = [...old.querySelectorAll("details[open]")].map((one) => one.id);
    const chosen = [...old.querySelectorAll("input[type=checkbox]")].map((one) => [one.id, one.checked]);
    const typed = [...old.querySelectorAll("input[id]:not([type=checkbox]), select[id]")].map((one) => [one.id, one.value]);
    const focused = old.contains(document.activeElement) ? document.activeElement.id || document.activeElement.closest("details")?.id : "";
    old.replaceWith(fresh);
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    for (const [id, checked] of chosen) if (document.getElementById(id)) document.getElementById(id).checked = checked;
    for (const [id, value] of typed) if (document.getElementById(id)) document.getElementById(id).value = value;
    if (focused) {
      const again = document.getElementById(focused);
      (again?.tagName === "DETAILS" ? again.querySelector("summary") : again)?.focus({ preventScroll: true });
    }
  }

  // Unchanged parts stay. A part with data-keep stays in any case, as long as the new page has a part with its id.
  function replace(html) {
    const page = document.createElement("template");
    page.innerHTML = html;
    const fresh = [...page.content.children];
    const now = fresh.map((part) => part.outerHTML);
    const old = [...content.children];
    if (fresh.length === old.length && fresh.every((part, number) => part.id === old[number].id)) {
      fresh.forEach((part, number) => {
        if (now[number] !== sent[number] && !("keep" in part.dataset)) exchange(old[number], part);
      });
    } else {
      const kept = old.filter((part) => "keep" in part.dataset);
      const before = document.createElement("div");
      before.append(...old);
      content.replaceChildren(before);
      exchange(before, page.content);
      for (const part of kept) document.getElementById(part.id)?.replaceWith(part);
    }
    sent = now;
    loadParts(content);
  }

  async function update() {
    if (document.hidden) return;
    try {
      const answer = await fetch(content.dataset.source, { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store" });
      if (answer.status === 401 || answer.status === 404) {
        location.reload();
        return;
      }
      if (!answer.ok && answer.status !== 304) throw new Error(`HTTP ${answer.status}`);
      if (answer.ok) {
        etag = answer.headers.get("ETag") || "";
        replace(await answer.text());
      }
      answeredAt = Date.now();
      say("live", false);
    } catch {
      say(`no answer since ${ago((Date.now() - answeredAt) / 1000).replace(" ago", "")}`, true);
    }
    showTimes();
  }

  document.addEventListener("visibilitychange", update);
  document.addEventListener("evenkeel-changed", update);
  setInterval(update, EVERY_SECONDS * 1000);
}

// Parts are loaded after the page: slow ones at once, others when their button is pressed or their form is sent. A click
// on an item shows its neighbours.
async function loadPart(part, address) {
  part.setAttribute("aria-busy", "true");
  try {
    const answer = await fetch(address, { cache: "no-store" });
    if (!answer.ok) {
      const { detail, errors = [] } = await answer.json();
      throw new Error([detail, ...errors.map((one) => one.remedy)].filter(Boolean).join(" "));
    }
    part.innerHTML = await answer.text();
  } catch (error) {
    const problem = document.createElement("p");
    problem.className = "problem";
    problem.textContent = error.message;
    part.replaceChildren(problem);
  }
  part.removeAttribute("aria-busy");
  showTimes();
}

function loadParts(root) {
  for (const part of root.querySelectorAll("[data-load]:not([data-loaded])")) {
    part.dataset.loaded = "";
    loadPart(part, part.dataset.load);
  }
}

function startParts() {
  document.addEventListener("submit", (event) => {
    const { part: address, into } = event.target.dataset;
    if (!address) return;
    event.preventDefault();
    const part = into ? document.getElementById(into) : event.target.closest("[data-load]");
    loadPart(part, `${address}?${new URLSearchParams(new FormData(event.target))}`);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-loads]");
    if (button) loadPart(button.parentElement, button.dataset.loads);
    const item = event.target.closest("[data-item]");
    const form = document.getElementById("neighbors");
    if (item && form) {
      form.elements.wanted.value = item.dataset.item;
      form.scrollIntoView({ block: "nearest" });
      form.requestSubmit();
    }
  });
}

document.querySelector(".bar nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
const login = document.getElementById("login");
const content = document.getElementById("content");
if (login) startLogin(login);
if (content?.dataset.source) startContent(content);
if (content) {
  startParts();
  loadParts(content);
  document.getElementById("logout").addEventListener("click", async () => {
    await fetch("/session", { method: "DELETE" });
    location.reload();
  });
}
showTimes();
