// Builds elements. Texts of documents and answers go in as text nodes: nothing here parses markup.

export const byId = (id) => document.getElementById(id);
export const count = (value) => value.toLocaleString("en");
export const ms = (value) => `${value < 10 ? value.toFixed(1) : count(Math.round(value))} ms`;
export const counted = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

export function element(name, text, parent, properties = {}) {
  const made = Object.assign(document.createElement(name), properties);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// Does what a control asks for; a second press meanwhile asks for nothing. A disabled control would lose focus.
export async function once(control, act) {
  if (control.ariaBusy === "true") return;
  control.ariaBusy = "true";
  try {
    await act();
  } finally {
    control.ariaBusy = null;
  }
}

// Does what a control asks for, and says in ``said`` why it failed.
export async function shown(said, act) {
  said.className = "";
  try {
    await act();
  } catch (error) {
    said.textContent = error.message;
    said.className = "error";
  }
}

// Says where in its document a passage is, empty for formats without pages.
export function placeOf(passage) {
  if (passage.page === null) return "";
  return `${passage.page_kind} ${passage.page}${passage.page_name ? ` (${passage.page_name})` : ""}`;
}

// A bar of [name, value, colour] with a table of the values below, which says the same without colours.
export function bar(parent, title, parts, format) {
  const shownParts = parts.filter(([, value]) => value > 0);
  element("h4", title, parent);
  const drawn = element("div", undefined, parent, { className: "bar", role: "img" });
  drawn.setAttribute("aria-label", shownParts.map(([name, value]) => `${name} ${format(value)}`).join(", ") || "nothing");
  const table = element("table", undefined, parent);
  table.setAttribute("aria-label", title);
  for (const [name, value, colour] of shownParts) {
    element("span", undefined, drawn, { className: colour }).style.flexGrow = value;
    const row = element("tr", undefined, table);
    const head = element("th", undefined, row, { scope: "row" });
    element("span", undefined, head, { className: `swatch ${colour}` });
    head.append(name);
    element("td", format(value), row);
  }
}
