// Rows of the lists that are drawn again while the user may be at one of their buttons.

/** Replace a list's rows. Replaced buttons would drop the keyboard's focus. */
export function replaceRows(list, rows) {
  const focused = document.activeElement?.dataset?.focus;
  const isInside = list.contains(document.activeElement);
  list.replaceChildren(...rows);
  if (focused && isInside) (list.querySelector(`[data-focus="${focused}"]`) ?? list.querySelector("button"))?.focus();
}

/** Show a modal dialog. If its opener is drawn again meanwhile, the new button gets the keyboard's focus. */
export function openDialog(dialog) {
  const opener = document.activeElement;
  const focused = opener?.dataset.focus;
  const restore = () => opener.isConnected || document.querySelector(`[data-focus="${focused}"]`)?.focus();
  if (focused) dialog.addEventListener("close", restore, { once: true });
  dialog.showModal();
}

/** `of`: what the button is about, for screen readers. `id`: of the row. */
export function rowButton(name, { of, id }, action) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "small";
  button.textContent = name;
  button.setAttribute("aria-label", `${name}: ${of}`);
  button.dataset.focus = `${name} ${id}`;
  button.addEventListener("click", action);
  return button;
}

export function rowText(className, text) {
  const line = document.createElement("p");
  line.className = className;
  line.textContent = line.title = text;
  return line;
}
