// A form made of a JSON schema: a control for each field, which edits a document and shows what is wrong with it.
"use strict";

class SpecForm {
  // element: parent of the form. schema: schema of the whole document, with $defs. choices: values to offer, by field
  // ("dataset.name"). edit: called with a function that changes the document.
  constructor(element, schema, choices, edit) {
    this.element = element;
    this.schema = schema;
    this.choices = choices;
    this.edit = edit;
    this.opened = new Set(schema.required);
    element.addEventListener("toggle", (event) => {
      const path = event.target.dataset.section;
      if (path) this.opened[event.target.open ? "add" : "delete"](path);
    }, true);
  }

  // Shows a document; opened sections stay open, and the control with the focus keeps it.
  show(document_) {
    const focused = document.activeElement?.dataset?.field;
    this.document = document_;
    this.element.replaceChildren(...this.rows(this.schema, []));
    if (focused) this.control(focused)?.focus();
  }

  // Marks the controls of invalid fields, given as [{field, message, remedy}], and opens their sections.
  mark(errors) {
    for (const one of this.element.querySelectorAll(".problem")) one.remove();
    for (const one of this.element.querySelectorAll("[aria-invalid]")) {
      one.removeAttribute("aria-invalid");
      one.removeAttribute("aria-describedby");
    }
    for (const [number, error] of errors.entries()) {
      const control = this.control(error.field || "");
      if (!control) continue;
      const said = SpecForm.made("p", { className: "problem", id: `wrong-${number}` });
      said.textContent = error.message;
      control.setAttribute("aria-invalid", "true");
      control.setAttribute("aria-describedby", said.id);
      control.after(said);
      for (let one = control.closest("details"); one; one = one.parentElement.closest("details")) one.open = true;
    }
  }

  // Returns the control of a field, or of the nearest field around it that has one.
  control(field) {
    for (let parts = field.split("."); parts.length; parts.pop()) {
      const found = this.element.querySelector(`[data-field="${CSS.escape(parts.join("."))}"]`);
      if (found) return found;
    }
    return null;
  }

  // --- from the schema ------------------------------------------------------------------------------------------------

  // Returns a schema with references resolved; "X or null" becomes X with isNullable.
  resolved(schema) {
    let { $ref, ...own } = schema;
    if ($ref) own = { ...this.schema.$defs[$ref.split("/").at(-1)], ...own };
    const others = (own.anyOf || []).filter((one) => one.type !== "null");
    if (own.anyOf && others.length === 1) {
      const { anyOf, ...rest } = own;
      return { ...this.resolved(others[0]), ...rest, isNullable: true };
    }
    return own;
  }

  rows(schema, path) {
    const required = new Set(schema.required || []);
    return Object.entries(schema.properties).flatMap(([name, part]) => {
      const field = this.resolved(part);
      if ("const" in field) return [];
      return [this.row(field, [...path, name], required.has(name))];
    });
  }

  row(schema, path, isRequired, put = (value) => this.put(path, value, false)) {
    if (schema.discriminator) return this.section(schema, path, this.kinds(schema, path));
    if (schema.properties) {
      if (schema.isNullable && !this.value(path)) return this.absent(schema, path);
      return this.section(schema, path, this.rows(schema, path));
    }
    if (schema.additionalProperties?.$ref) return this.section(schema, path, this.named(schema, path));
    const row = SpecForm.made("div", { className: "row" });
    const control = this.input(schema, path, isRequired, put);
    const label = SpecForm.made("label", { htmlFor: control.id });
    label.append(this.prefix(path), SpecForm.made("code", { textContent: path.at(-1) }));
    const hint = isRequired ? " required" : control.read === JSON.parse ? " JSON" : "";
    if (hint) label.append(SpecForm.made("span", { className: "quiet", textContent: hint }));
    row.append(label, control);
    return row;
  }

  section(schema, path, rows) {
    const name = path.join(".");
    const section = SpecForm.made("details", { open: this.opened.has(name) });
    section.dataset.section = name;
    const summary = SpecForm.made("summary");
    const value = this.value(path);
    const said = value?.kind || (value && Object.keys(value).length ? Object.keys(value).join(", ") : "default");
    summary.append(SpecForm.made("code", { textContent: path.at(-1) }), ` `, SpecForm.made("span", { className: "quiet", textContent: said }));
    section.append(summary, ...rows);
    if (schema.isNullable) {
      const remove = SpecForm.made("button", { type: "button", className: "quiet", textContent: `Remove ${name}` });
      remove.addEventListener("click", () => this.put(path, undefined, true));
      section.append(remove);
    }
    return section;
  }

  // Returns the row of an optional object that the document lacks, with a button that adds it.
  absent(schema, path) {
    const row = SpecForm.made("div", { className: "row" });
    const add = SpecForm.made("button", { type: "button", className: "quiet", textContent: "Add" });
    add.setAttribute("aria-label", `Add ${path.join(".")}`);
    add.dataset.field = path.join(".");
    add.addEventListener("click", () => {
      this.opened.add(path.join("."));
      this.put(path, {}, true);
    });
    row.append(SpecForm.made("code", { textContent: path.at(-1) }), add);
    return row;
  }

  // Returns the rows of an object of several kinds: a choice of the kind, and the fields of that kind.
  kinds(schema, path) {
    const tag = schema.discriminator.propertyName;
    const kinds = schema.discriminator.mapping;
    const value = this.value(path);
    const chosen = this.resolved({ $ref: kinds[value?.[tag]] || Object.values(kinds)[0] });
    const put = (kind) => {
      const next = this.resolved({ $ref: kinds[kind] });
      const kept = Object.entries(this.value(path) || {}).filter(([name]) => name in next.properties);
      this.put(path, { ...Object.fromEntries(kept), [tag]: kind }, true);
    };
    return [this.row({ enum: Object.keys(kinds) }, [...path, tag], true, put), ...this.rows(chosen, path)];
  }

  // Returns the rows of named objects: a section for each, and an input for the name of a new one.
  named(schema, path) {
    const one = this.resolved(schema.additionalProperties);
    const sections = Object.keys(this.value(path) || {}).map((name) => this.section({ ...one, isNullable: true }, [...path, name], this.rows(one, [...path, name])));
    const row = SpecForm.made("div", { className: "row" });
    const name = SpecForm.made("input", { id: `add-${path.join(".")}`, autocomplete: "off" });
    name.dataset.field = path.join(".");
    name.addEventListener("change", () => {
      const added = name.value.trim();
      if (!added) return;
      this.opened.add(path.join(".")).add([...path, added].join("."));
      this.put([...path, added], {}, true);
    });
    row.append(SpecForm.made("label", { htmlFor: name.id, textContent: `Add to ${path.join(".")}` }), name);
    return [...sections, row];
  }

  // --- controls -------------------------------------------------------------------------------------------------------

  input(schema, path, isRequired, put) {
    const field = path.join(".");
    const offered = this.choices[field] || schema.enum || (schema.type === "boolean" ? [true, false] : null);
    const control = offered ? this.select(offered, schema, isRequired, this.value(path)) : this.typed(schema, this.value(path));
    control.id = `f-${field}`;
    control.dataset.field = field;
    control.required = isRequired;
    control.addEventListener("input", () => {
      try {
        put(control.value === "" ? undefined : control.read(control.value));
      } catch (error) {
        if (!(error instanceof SyntaxError)) throw error;
        control.setAttribute("aria-invalid", "true");
      }
    });
    return control;
  }

  select(offered, schema, isRequired, value) {
    const control = SpecForm.made("select");
    const names = offered.map(String);
    if (value !== undefined && value !== null && !names.includes(String(value))) names.push(String(value));
    if (!isRequired || value === undefined) names.unshift("");
    for (const name of names) {
      const text = name === "" ? (isRequired ? "choose" : `${SpecForm.text(schema.default)} (default)`) : name;
      control.append(SpecForm.made("option", { value: name, textContent: text, selected: name === String(value ?? "") }));
    }
    control.read = (text) => (schema.type === "boolean" ? text === "true" : text);
    return control;
  }

  typed(schema, value) {
    const isNumber = ["integer", "number"].includes(schema.type);
    const isList = schema.type === "array" && ["integer", "number", "string"].includes(schema.items?.type);
    const isText = schema.type === "string" || Boolean(schema.anyOf);
    const control = SpecForm.made(isNumber || isList || isText ? "input" : "textarea", isNumber ? { type: "number" } : {});
    control.placeholder = SpecForm.text(schema.default);
    control.spellcheck = false;
    control.autocomplete = "off";
    if (isNumber) {
      control.step = schema.type === "integer" ? "1" : "any";
      if (schema.minimum !== undefined) control.min = schema.minimum;
      if (schema.maximum !== undefined) control.max = schema.maximum;
      control.read = Number;
    } else if (isList) {
      const item = schema.items.type === "string" ? String : Number;
      control.read = (text) => text.split(",").map((one) => item(one.trim()));
    } else if (isText) {
      control.read = (text) => (schema.anyOf && text.trim() !== "" && !Number.isNaN(Number(text)) ? Number(text) : text);
    } else {
      control.rows = 2;
      control.className = "json";
      control.read = JSON.parse;
    }
    control.value = value === undefined || value === null ? "" : isList || isText || isNumber ? SpecForm.text(value) : JSON.stringify(value);
    return control;
  }

  prefix(path) {
    return SpecForm.made("span", { className: "hidden", textContent: path.slice(0, -1).map((one) => `${one}.`).join("") });
  }

  // --- the document ---------------------------------------------------------------------------------------------------

  value(path) {
    return path.reduce((value, name) => value?.[name], this.document);
  }

  put(path, value, isRedrawn) {
    this.edit((body) => {
      const inside = (one, name) => (SpecForm.isObject(one[name]) ? one[name] : (one[name] = {}));
      const parent = path.slice(0, -1).reduce(inside, body);
      if (value === undefined) delete parent[path.at(-1)];
      else parent[path.at(-1)] = value;
      this.document = body;
      if (isRedrawn) this.show(body);
    });
  }

  static isObject(value) {
    return value !== null && typeof value === "object" && !Array.isArray(value);
  }

  static text(value) {
    if (Array.isArray(value)) return value.join(", ");
    if (value === undefined || value === null) return "none";
    return typeof value === "object" ? JSON.stringify(value) : String(value);
  }

  static made(tag, properties = {}) {
    return Object.assign(document.createElement(tag), properties);
  }
}
