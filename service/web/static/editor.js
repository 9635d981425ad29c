// The editor of a new job's spec, by fields or as text. A dry run of the API validates the spec while it is typed;
// then it is submitted.
"use strict";

(() => {
  const form = document.getElementById("editor");
  const spec = document.getElementById("spec");
  const verdict = document.getElementById("verdict");
  const submit = form.querySelector("[type=submit]");
  const element = document.getElementById("fields");
  const datasets = JSON.parse(element.dataset.datasets);
  const fields = new SpecForm(element, JSON.parse(element.dataset.schema), datasets.length ? { "dataset.name": datasets } : {}, change);
  const PAUSE_MS = 900;
  let timer = 0;
  let latest = 0;
  let text = null;
  let body = null;

  function paragraph(text, name) {
    const one = document.createElement("p");
    one.textContent = text;
    one.className = name;
    return one;
  }

  function problems(said) {
    const list = document.createElement("ul");
    list.className = "problems";
    for (const error of said.errors?.length ? said.errors : [{ field: "", message: said.detail, remedy: "" }]) {
      const item = document.createElement("li");
      const field = document.createElement("code");
      field.textContent = error.field || "spec";
      item.append(field, ` ${error.message}`);
      if (error.remedy) item.append(paragraph(error.remedy, "hint"));
      list.append(item);
    }
    return list;
  }

  function gibibytes(bytes) {
    return bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`;
  }

  function estimated(estimate) {
    const memory = estimate?.peak_memory_bytes;
    return memory ? `Valid. Predicted: ${gibibytes(memory)} of memory at its peak, ${Math.max(1, Math.ceil(estimate.seconds_per_epoch))} s per epoch.` : "Valid.";
  }

  // Reads the text into `body`, null if it holds no spec, and shows it. Text that is no JSON is YAML, which the service
  // reads as the command line does. Returns true for a spec, unless the text changed meanwhile.
  async function read() {
    const asked = spec.value;
    if (asked === text) return body !== null;
    let said = null;
    let problem = "";
    try {
      if (asked.trimStart().startsWith("{")) said = JSON.parse(asked);
      else {
        const answer = await fetch(form.dataset.yaml, { method: "POST", headers: { "Content-Type": "application/yaml" }, body: asked });
        if (answer.ok) said = await answer.json();
        else problem = (await answer.json()).detail;
      }
    } catch (error) {
      problem = error instanceof SyntaxError ? `Not JSON yet: ${error.message}` : "The service does not answer.";
    }
    if (asked !== spec.value) return false;
    text = said && asked;
    body = said;
    spec.setAttribute("aria-invalid", body === null);
    if (body === null) verdict.replaceChildren(paragraph(problem, "problem"));
    else fields.show(body);
    return body !== null;
  }

  function post(query, body) {
    const headers = { "Content-Type": "application/json" };
    return fetch(`${form.dataset.url}${query}`, { method: "POST", headers, body: JSON.stringify(body) });
  }

  async function validate() {
    const mine = ++latest;
    if (!(await read())) return;
    try {
      const answer = await post("?dry_run=true", body);
      const said = await answer.json();
      if (mine !== latest) return;
      spec.setAttribute("aria-invalid", !answer.ok);
      fields.mark(said.errors || []);
      verdict.replaceChildren(answer.ok ? paragraph(estimated(said.estimate), "good") : problems(said));
    } catch {
      if (mine === latest) verdict.replaceChildren(paragraph("The service does not answer.", "problem"));
    }
  }

  function changed() {
    clearTimeout(timer);
    timer = setTimeout(validate, PAUSE_MS);
  }

  async function change(edit) {
    const isTyped = spec.value !== text;
    if (!(await read())) return;
    edit(body);
    if (isTyped) fields.show(body);
    spec.value = text = JSON.stringify(body, null, 2);
    changed();
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearTimeout(timer);
    latest++;
    if (!(await read())) return;
    submit.disabled = true;
    try {
      const answer = await post("", body);
      const said = await answer.json();
      if (answer.ok) location.href = form.dataset.then.replace("{id}", said.id);
      else verdict.replaceChildren(problems(said));
    } catch {
      verdict.replaceChildren(paragraph("The service does not answer.", "problem"));
    }
    submit.disabled = false;
  });
  spec.addEventListener("input", () => {
    verdict.replaceChildren();
    if (spec.value.trimStart().startsWith("{")) read();
    changed();
  });
  validate();
})();
