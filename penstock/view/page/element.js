"use strict";

/** Create an element with attributes, event listeners (functions) and children. Texts stay text: no name becomes markup. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value); else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
