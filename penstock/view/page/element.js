"use strict";

/** An element with attributes and children; texts go in as text, so a name is never markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value); else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
