// Keeps the keyboard's place: a button that is hidden, removed or disabled while it has the focus would drop it.

const LOOK_MS = 100;

/** Give the focus to the first usable element of `selectors` when the one that has it goes away. */
export function keepFocus(selectors) {
  let last = null;
  addEventListener("focusin", ({ target }) => {
    last = target;
  });
  setInterval(() => {
    if (!last || document.activeElement !== document.body) return;
    const previous = last;
    last = null;
    // A click beside all elements takes the focus away, too. The element is still there then.
    if (isUsable(previous)) return;
    selectors.map((selector) => document.querySelector(selector)).find((each) => each && isUsable(each))?.focus();
  }, LOOK_MS);
}

function isUsable(element) {
  return element.isConnected && element.getClientRects().length > 0 && !element.matches(":disabled");
}
