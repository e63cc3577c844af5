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
  const url = new URL(location.href);
  const key = url.searchParams.get("access_token");
  if (key === null) return read(sessionStorage, KEY);
  // Out of the address, so that it stays neither in the history nor in a link that is passed on.
  rememberKey(key);
  url.searchParams.delete("access_token");
  history.replaceState(null, "", url);
  return key;
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
