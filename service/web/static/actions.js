// Actions that change something: a dialog asks for confirmation, then a request goes to the documented API.
"use strict";

(() => {
  const dialog = document.getElementById("ask");
  const done = document.getElementById("done");
  let asked = null;

  function tell(text) {
    done.textContent = text;
    done.hidden = false;
    clearTimeout(tell.timer);
    tell.timer = setTimeout(() => (done.hidden = true), 6000);
  }

  // Return the fields of the form as JSON, without empty fields.
  function bodyOf(form) {
    const body = JSON.parse(form.dataset.body || "{}");
    for (const field of form.elements) {
      if (!field.name) continue;
      if ("list" in field.dataset) {
        if (field.checked) (body[field.name] ||= []).push(field.value);
      } else if ("boolean" in field.dataset) body[field.name] = field.checked;
      else if (field.value.trim()) body[field.name] = field.value.trim();
    }
    return body;
  }

  function reveal(form, answer) {
    const secret = document.createElement("input");
    secret.id = "ask-secret";
    secret.readOnly = true;
    secret.value = answer[form.dataset.reveal];
    const label = document.createElement("label");
    label.htmlFor = secret.id;
    label.textContent = "Shown only this once, save it now:";
    const close = document.createElement("button");
    close.type = "button";
    close.dataset.close = "";
    close.textContent = "Close";
    form.replaceChildren(form.querySelector("h2"), label, secret, close);
    secret.select();
  }

  async function send(form) {
    const problem = form.querySelector(".problem");
    const button = form.querySelector("[type=submit]");
    problem.hidden = true;
    button.disabled = true;
    try {
      const method = form.dataset.method;
      const body = bodyOf(form);
      const init = { method, headers: { "Idempotency-Key": form.dataset.once } };
      if (method !== "DELETE" && Object.keys(body).length) {
        init.headers["Content-Type"] = "application/json";
        init.body = JSON.stringify(body);
      }
      const answer = await fetch(form.dataset.url, init);
      if (answer.status === 401) location.reload();
      const text = await answer.text();
      const said = text ? JSON.parse(text) : {};
      if (!answer.ok) {
        const remedies = (said.errors || []).map((one) => one.remedy).filter(Boolean);
        throw new Error([said.detail || `HTTP ${answer.status}`, ...remedies].join(" "));
      }
      document.dispatchEvent(new Event("evenkeel-changed"));
      if (form.dataset.reveal) {
        reveal(form, said);
        return;
      }
      dialog.close();
      if (form.dataset.then) location.href = form.dataset.then.replace("{id}", said.id);
      else if (form.dataset.done) tell(form.dataset.done);
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
      form.dataset.once = crypto.randomUUID ? crypto.randomUUID() : `${Date.now()}-${Math.random()}`;
    } finally {
      button.disabled = false;
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-ask]");
    if (button) {
      asked = button.dataset.ask;
      const form = document.getElementById(asked).content.firstElementChild.cloneNode(true);
      // crypto.randomUUID exists only on https and localhost.
      form.dataset.once = crypto.randomUUID ? crypto.randomUUID() : `${Date.now()}-${Math.random()}`;
      dialog.replaceChildren(form);
      dialog.showModal();
    }
    if (event.target.closest("[data-close]")) dialog.close();
  });
  dialog.addEventListener("submit", (event) => {
    event.preventDefault();
    send(event.target);
  });
  dialog.addEventListener("close", () => document.querySelector(`[data-ask="${asked}"]`)?.focus());
})();
