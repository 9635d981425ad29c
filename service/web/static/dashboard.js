// The dashboard's own script: signing in and out, and keeping the page's content as it is on the server.
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

  function say(text, late) {
    if (live.textContent !== text) live.textContent = text;
    live.classList.toggle("late", late);
  }

  function replace(html) {
    const open = [...content.querySelectorAll("details[open]")].map((one) => one.id);
    const focused = document.activeElement?.closest("details")?.id;
    content.innerHTML = html;
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    if (focused) document.getElementById(focused)?.querySelector("summary")?.focus({ preventScroll: true });
  }

  async function update() {
    if (document.hidden) return;
    try {
      const answer = await fetch(content.dataset.source, { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store" });
      if (answer.status === 401) {
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

  document.getElementById("logout").addEventListener("click", async () => {
    await fetch("/session", { method: "DELETE" });
    location.reload();
  });
  document.addEventListener("visibilitychange", update);
  setInterval(update, EVERY_SECONDS * 1000);
}

const login = document.getElementById("login");
const content = document.getElementById("content");
if (login) startLogin(login);
if (content) startContent(content);
showTimes();
