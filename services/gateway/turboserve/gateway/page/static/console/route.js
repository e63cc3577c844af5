// What the operator looks at is in the address: the view, the pool, and the time.

export const VIEWS = ["overview", "workers", "migrations", "decisions", "queue", "quality", "cost"];
const ID = /^[A-Za-z0-9_-]{1,64}$/;
const LONGEST_S = 86_400;
/** Seconds that a view shows unless the address says otherwise. */
const SPANS = { workers: 120 };
const SPAN_S = 3_600;

/** Read an address such as `#/workers?pool=local&span=600&to=2026-11-26T15:00:00.000Z`. */
export function readRoute(hash) {
  if (!hash.startsWith("#/")) {
    // The address of earlier versions: only a pool.
    const id = hash.slice(1);
    return { view: "overview", pool: ID.test(id) ? id : null, span: null, to: null };
  }
  const [path, query = ""] = hash.slice(2).split("?");
  const values = new URLSearchParams(query);
  const pool = values.get("pool") ?? "";
  const span = Number(values.get("span"));
  const to = Date.parse(values.get("to") ?? "");
  return {
    view: VIEWS.includes(path) ? path : "overview",
    pool: ID.test(pool) ? pool : null,
    span: span > 0 && span <= LONGEST_S ? Math.round(span) : null,
    to: Number.isFinite(to) ? to : null,
  };
}

export function routeHash({ view, pool, span, to }) {
  const values = new URLSearchParams();
  if (pool) values.set("pool", pool);
  if (span) values.set("span", String(span));
  if (to !== null) values.set("to", new Date(to).toISOString());
  return `#/${view}${values.size ? `?${values}` : ""}`;
}

/** The range in milliseconds. `live`: it ends now, and moves. */
export function rangeOf(route) {
  const spanS = route.span ?? SPANS[route.view] ?? SPAN_S;
  const until = route.to ?? Date.now();
  return { since: until - spanS * 1_000, until, spanS, live: route.to === null };
}
