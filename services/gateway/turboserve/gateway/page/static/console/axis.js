// Scales and ticks of plots.

const TIMES_S = [5, 10, 30, 60, 120, 300, 600, 1_800, 3_600, 10_800, 21_600];

/** Times of at most `most` ticks in a range of milliseconds, at round local times. */
export function timeTicks(since, until, most) {
  const step = (TIMES_S.find((each) => (until - since) / 1_000 / each <= most) ?? TIMES_S.at(-1)) * 1_000;
  const offset = new Date(since).getTimezoneOffset() * 60_000;
  const ticks = [];
  for (let at = Math.ceil((since - offset) / step) * step + offset; at <= until; at += step) ticks.push(at);
  return ticks;
}

export function tickText(at, spanMs) {
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  if (spanMs <= 600_000) options.second = "2-digit";
  return new Date(at).toLocaleTimeString([], options);
}

/** A round number that is not below `value`. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].find((factor) => factor * power >= value * (1 - 1e-9)) * power;
}
