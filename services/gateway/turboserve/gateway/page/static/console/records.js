// Views that are lists over time: migrations and decisions. Earlier pages stay when new records arrive.

import { element, keyed, numbersOf, period, setText, setTime, showEmpty } from "./elements.js";
import { decided } from "./overview.js";

const at = (id) => document.getElementById(id);
const PAGE = 100;

class Records {
  everyMs = 3_000;

  /**
   * `name`: of the view, of the route and of the answer's member. `keyOf`, `make`, `update`: as for `keyed`.
   * `nothing(range)`: words for an empty range.
   */
  constructor(name, { keyOf, make, update, nothing }) {
    Object.assign(this, { name, keyOf, make, update, nothing });
    at(`${name}-earlier`).addEventListener("click", () => this.#earlier());
  }

  #records = new Map();
  #next = null;
  #read = null;
  #range = null;
  /** Pool and end of the range to which the records belong. */
  #of = "";

  async load(read, range) {
    this.#read = read;
    return { of: `${read.pool} ${range.live ? "live" : range.until} ${range.spanS}`, page: await read(this.name, { limit: PAGE }) };
  }

  show({ of, page }, range) {
    const isNew = of !== this.#of;
    if (isNew) this.#records.clear();
    this.#of = of;
    this.#range = range;
    // While live, only the first page is read again: what was after it is after it still.
    if (isNew || this.#next === null) this.#next = page.next;
    this.#add(page[this.name]);
  }

  #add(records) {
    for (const record of records) this.#records.set(this.keyOf(record), record);
    const began = (record) => Date.parse(record.at ?? record.began_at);
    // A live range moves: what it has left is forgotten, so that a page that stays open for days does not grow.
    for (const [key, record] of this.#records) if (began(record) < this.#range.since) this.#records.delete(key);
    const shown = [...this.#records.values()];
    shown.sort((one, other) => began(other) - began(one));
    keyed(at(`${this.name}-list`), shown, this.keyOf, this.make, this.update);
    showEmpty(at(`${this.name}-empty`), !shown.length, this.nothing(this.#range));
    at(`${this.name}-earlier`).hidden = this.#next === null;
  }

  async #earlier() {
    const [of, button] = [this.#of, at(`${this.name}-earlier`)];
    if (button.getAttribute("aria-disabled") === "true") return;
    // Not `disabled`: the keyboard's focus would be lost.
    button.setAttribute("aria-disabled", "true");
    try {
      const page = await this.#read(this.name, { limit: PAGE, after: this.#next });
      if (of !== this.#of) return;
      this.#next = page.next;
      this.#add(page[this.name]);
    } catch {
      // The button stays: the operator may try again, and the view itself shows what is wrong.
      return;
    } finally {
      button.setAttribute("aria-disabled", "false");
    }
  }
}

function makeRecord(record) {
  const row = element("li");
  row.append(
    element("time"),
    element("span", "", { className: "what" }),
    element("span", "", { className: "more" }),
  );
  const numbers = numbersOf(record.numbers);
  if (numbers) row.append(numbers);
  return row;
}

function updateDecision(row, one) {
  row.dataset.kind = one.kind;
  setTime(row.firstElementChild, one.at);
  setText(row.children[1], one.kind === "scaling" ? decided(one) : [one.action, one.member, one.worker].filter(Boolean).join(" "));
  setText(row.children[2], one.reason);
}

function updateMigration(row, one) {
  row.dataset.outcome = one.outcome;
  setTime(row.firstElementChild, one.began_at);
  const took = one.ended_at === null ? "" : ` after ${((Date.parse(one.ended_at) - Date.parse(one.began_at)) / 1_000).toFixed(2)} s`;
  setText(row.children[1], `${one.session} of ${one.tenant}: ${one.source ?? "unknown worker"} → ${one.target}, ${one.outcome}${took}`);
  setText(row.children[2], [one.reason, one.outcome === "abandoned" ? one.detail : ""].filter(Boolean).join(" · "));
}

export const decisions = new Records("decisions", {
  keyOf: (one) => one.id,
  make: makeRecord,
  update: updateDecision,
  nothing: (range) => `No decision was made ${period(range)}: there was no reason to change the pool.`,
});

export const migrations = new Records("migrations", {
  keyOf: (one) => `${one.session} ${one.migration}`,
  make: makeRecord,
  update: updateMigration,
  nothing: (range) => `No session migrated to this pool's workers ${period(range)}.`,
});
