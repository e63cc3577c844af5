// Which session this page shows survives a reload: in the address, and in the browser for the bare address.

const SESSION = "turboserve.session";
const KEY = "turboserve.key";
const ID = /^[A-Za-z0-9_-]{1,64}$/;

export function rememberedSession() {
  // Not decoded: an id needs no escapes, and a broken one would end the script.
  const id = location.hash.slice(1) || read(localStorage, SESSION);
  return ID.test(id) ? id : null;
}

export function rememberSession(id) {
  const url = new URL(location.href);
  url.hash = id ?? "";
  history.replaceState(null, "", url.hash ? url : url.pathname + url.search);
  write(localStorage, SESSION, id);
}

export function rememberedKey() {
  return new URLSearchParams(location.search).get("access_token") ?? read(sessionStorage, KEY);
}

export function rememberKey(key) {
  write(sessionStorage, KEY, key);
}

// Storage can be switched off; the page then only forgets sooner.
function read(storage, name) {
  try {
    return storage.getItem(name) ?? "";
  } catch {
    return "";
  }
}

function write(storage, name, value) {
  try {
    if (value) storage.setItem(name, value);
    else storage.removeItem(name);
  } catch {
    return;
  }
}
