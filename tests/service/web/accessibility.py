"""What a page must have for keyboards, screen readers and weak eyes: names, headings, contrast, no overflow."""

from __future__ import annotations

FAULTS = """
() => {
  const faults = [];
  const shown = (one) => one.checkVisibility() && getComputedStyle(one).clipPath === "none";
  const where = (one) => one.outerHTML.slice(0, 120);

  if (!document.documentElement.lang || !document.title.trim()) faults.push("no language or title");
  const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) faults.push(`two elements of id ${id}`);
  for (const name of ["aria-labelledby", "aria-describedby"])
    for (const one of document.querySelectorAll(`[${name}]:not(dialog:not([open]))`))
      for (const id of one.getAttribute(name).split(" "))
        if (!document.getElementById(id)) faults.push(`names ${id}, which is not there: ${where(one)}`);

  const headings = [...document.querySelectorAll("h1, h2, h3, h4")].filter((one) => one.checkVisibility());
  if (headings.filter((one) => one.tagName === "H1").length !== 1) faults.push("not one h1");
  headings.reduce((level, one) => {
    const next = Number(one.tagName[1]);
    if (next > level + 1) faults.push(`skips a level: ${where(one)}`);
    return next;
  }, 0);

  for (const one of document.querySelectorAll("input:not([type=hidden]), select, textarea"))
    if (!one.labels?.length && !one.getAttribute("aria-label")) faults.push(`no label: ${where(one)}`);
  for (const one of document.querySelectorAll("button, a[href], summary"))
    if (!one.textContent.trim() && !one.getAttribute("aria-label")) faults.push(`no name: ${where(one)}`);
  for (const one of document.querySelectorAll("svg, progress"))
    if (!one.getAttribute("aria-label")) faults.push(`no name: ${where(one)}`);
  for (const one of document.querySelectorAll("th"))
    if (!one.scope) faults.push(`no scope: ${where(one)}`);
  for (const one of document.querySelectorAll("th"))
    if (one.checkVisibility() && !one.textContent.trim()) faults.push(`an empty heading: ${where(one)}`);

  const parsed = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const over = (top, below) => {
    const alpha = top[3] ?? 1;
    return [0, 1, 2].map((part) => top[part] * alpha + below[part] * (1 - alpha));
  };
  const ground = (one) => {
    const layers = [];
    for (let part = one; part; part = part.parentElement) layers.push(parsed(getComputedStyle(part).backgroundColor));
    return layers.reverse().reduce((below, top) => (top.length ? over(top, below) : below), [255, 255, 255]);
  };
  const light = (colour) =>
    [0.2126, 0.7152, 0.0722].reduce((sum, weight, part) => {
      const value = colour[part] / 255;
      return sum + weight * (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    }, 0);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const one = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || one.closest("svg title, script, template") || !shown(one)) continue;
    const style = getComputedStyle(one);
    const behind = ground(one);
    const front = over(parsed(one.closest("svg") ? style.fill : style.color), behind);
    const [low, high] = [light(front), light(behind)].sort((left, right) => left - right);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (isLarge ? 3 : 4.5)) faults.push(`contrast ${ratio.toFixed(2)}: ${where(one)}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) faults.push(`${document.documentElement.scrollWidth} px wide`);
  return [...new Set(faults)];
}
"""
"""An expression for the browser: a list of what is wrong with the page that it shows."""
