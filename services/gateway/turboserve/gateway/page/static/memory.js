// Which session this page shows survives a reload: in the address, and in the browser for the bare address.

import { sharedLink } from "./sharing.js";

const SESSION = "turboserve.session";
const KEY = "turboserve.key";
const LEAD = "turboserve.lead";
const ID = /^[A-Za-z0-9_-]{1,64}$/;

export function rememberedSession() {
  // Not decoded: an id needs no escapes, and a broken one would end the script.
  const id = location.hash.slice(1) || read(localStorage, SESSION);
  return ID.test(id) ? id : null;
}

export function rememberSession(id) {
  // The address of a shared page stays, and its session is not the user's own.
  if (sharedLink()) return;
  const url = new URL(location.href);
  url.hash = id ?? "";
  history.replaceState(null, "", url.hash ? url : url.pathname + url.search);
  write(localStorage, SESSION, id);
}

// The bare address shows it no more. Its own address does.
export function forgetSession() {
  if (!sharedLink()) write(localStorage, SESSION, null);
}

export function rememberedKey() {
  const url = new URL(location.href);
  if (url.searchParams.has("access_token")) {
    // No key is taken from an address. It goes out of it, so that it is not passed on with a link.
    url.searchParams.delete("access_token");
    history.replaceState(null, "", url);
  }
  return read(sessionStorage, KEY);
}

export function rememberKey(key) {
  write(sessionStorage, KEY, key);
}

export function rememberedLead() {
  return read(localStorage, LEAD);
}

export function rememberLead(name) {
  write(localStorage, LEAD, name);
}

// Keys pass between tabs of this page, and are stored for as long as a tab is open.
const tabs = "BroadcastChannel" in globalThis ? new BroadcastChannel("turboserve.key") : null;
const OTHER_TAB_MS = 200;

tabs?.addEventListener("message", ({ data }) => {
  const key = read(sessionStorage, KEY);
  if (data === "wanted" && key) tabs.postMessage({ key });
});

// Tell the other open tabs which key the user has entered in this one.
export function shareKey(key) {
  tabs?.postMessage({ entered: key });
}

// Call `handle` with each key that the user enters in another tab.
export function onKeyEntered(handle) {
  tabs?.addEventListener("message", ({ data }) => data?.entered && handle(data.entered));
}

// The key that another open tab has; empty if there is none.
export function keyOfOtherTab() {
  if (!tabs) return Promise.resolve("");
  return new Promise((resolve) => {
    const heard = ({ data }) => data?.key && resolve(data.key);
    tabs.addEventListener("message", heard);
    setTimeout(() => {
      tabs.removeEventListener("message", heard);
      resolve("");
    }, OTHER_TAB_MS);
    tabs.postMessage("wanted");
  });
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
