// Workers with their sessions as lanes of chunks, and migrations between them.

import { classOf, Lanes } from "./lanes.js";
import { keyed, period, setCells, showEmpty, tableRow } from "./elements.js";

const at = (id) => document.getElementById(id);
const MIGRATIONS = 500;
/** Pages of workers that the view reads: more lanes than that cannot be read. */
const PAGES = 4;

const lanes = new Lanes(at("lanes"));

export const workers = {
  everyMs: 2_000,
  /** Bars of a long range are steps. Until the next one ends, the same bars would be read again. */
  readsASpan: 180,
  async load(read) {
    const found = [];
    let after;
    for (let page = 0; page < PAGES && after !== null; page += 1) {
      const answer = await read("workers", { after });
      found.push(...answer.workers);
      after = answer.next;
    }
    return { workers: found, more: after !== null, ...(await read("migrations", { limit: MIGRATIONS })) };
  },
  show(answer, range) {
    const shown = answer.workers;
    lanes.draw(shown, answer.migrations, range);
    keyed(at("worker-rows"), shown, (worker) => worker.worker, () => tableRow(8), (row, worker) => {
      const bars = worker.sessions.flatMap((lane) => lane.bars);
      const sum = (name) => bars.reduce((total, bar) => total + bar[name], 0);
      const urgent = worker.sessions.filter((lane) => classOf(lane.bars.at(-1)) === "urgent").length;
      const counts = [worker.capacity, worker.sessions.length, sum("chunks"), sum("late"), sum("lowered"), urgent];
      setCells(row, [worker.member ?? worker.worker, worker.phase, ...counts.map(String)]);
    });
    at("lanes").hidden = !shown.length;
    at("worker-table").hidden = !shown.length;
    showEmpty(at("workers-empty"), !shown.length, `This pool had no worker ${period(range)}.`);
    showEmpty(at("workers-more"), answer.more, "There are more workers than are shown here.");
  },
};
