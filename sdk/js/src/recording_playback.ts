// Plays a recording in a `<video>` with Media Source Extensions: fetches the segments that the playhead needs.

import { PlaybackError, TurboServeError } from "./errors.js";
import type { Recording } from "./recording.js";

const AHEAD_S = 20;
const BEHIND_S = 30;
/** How often a recording that still grows, or has no video yet, is looked at. */
const LOOK_MS = 2000;

/** One segment of a recording. Times are seconds of the whole recording. */
interface Segment {
  name: string;
  /** Name of the init segment that decodes it. */
  init: string;
  /** Where the part begins that it belongs to. */
  offset: number;
  start: number;
  end: number;
}

/**
 * Plays a recording in a `<video>`: fetches the segments that the playhead needs. For browsers.
 *
 * Seeking, pausing and the length are the `<video>`'s own. A recording that still grows plays on.
 */
export class RecordingPlayback {
  /** `onError`: nothing more will be played. */
  constructor(recording: Recording, video: HTMLVideoElement, onError: (error: TurboServeError) => void = () => {}) {
    this.#recording = recording;
    this.#video = video;
    this.#onError = onError;
    const Source = globalThis.ManagedMediaSource ?? globalThis.MediaSource;
    if (!Source) {
      queueMicrotask(() => this.#fail(new Error("there are no Media Source Extensions")));
      return;
    }
    this.#source = new Source();
    video.disableRemotePlayback = true;
    this.#address = URL.createObjectURL(this.#source);
    video.src = this.#address;
    for (const name of ["timeupdate", "seeking"]) video.addEventListener(name, this.#wake);
    this.#source.addEventListener("sourceopen", () => this.#run().catch((error) => this.#fail(error)), { once: true });
  }

  #recording: Recording;
  #video: HTMLVideoElement;
  #onError: (error: TurboServeError) => void;
  #source: MediaSource | null = null;
  #address = "";
  #buffer: SourceBuffer | null = null;
  #segments: Segment[] = [];
  #isComplete = false;
  #init: string | null = null;
  #isClosed = false;
  #awaited: (() => void) | null = null;
  #wake = () => this.#awaited?.();

  /** Leave the video. */
  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    for (const name of ["timeupdate", "seeking"]) this.#video.removeEventListener(name, this.#wake);
    this.#wake();
    if (!this.#address) return;
    URL.revokeObjectURL(this.#address);
    if (this.#video.src === this.#address) {
      this.#video.removeAttribute("src");
      this.#video.load();
    }
  }

  async #run(): Promise<void> {
    let lookedAtMs = -Infinity;
    while (!this.#isClosed) {
      if (!this.#isComplete && performance.now() - lookedAtMs >= LOOK_MS) {
        await this.#look();
        lookedAtMs = performance.now();
      }
      const next = this.#next();
      if (next) await this.#append(next);
      else {
        this.#finish();
        await this.#news();
      }
    }
  }

  async #look(): Promise<void> {
    try {
      const { segments, isComplete } = segmentsOf(await this.#recording.playlist());
      this.#segments = segments;
      this.#isComplete = isComplete;
    } catch (error) {
      // Nothing is stored yet.
      if ((error as { status?: number }).status !== 404 || (await this.#recording.refresh()).state === "complete") throw error;
    }
    this.#extend();
  }

  // Without the end of the stream, the element would wait for more at its end. A later segment opens it again.
  #finish(): void {
    if (!this.#isComplete || this.#isClosed || this.#source!.readyState !== "open" || !this.#buffer) return;
    if (this.#has(this.#segments.at(-1)!.end - 0.01)) this.#source!.endOfStream();
  }

  #extend(): void {
    const last = this.#segments.at(-1);
    if (!last || this.#isClosed || !this.#buffer || this.#buffer.updating || this.#source!.readyState !== "open") return;
    const duration = Math.max(last.end, this.#end);
    if (!(Math.abs(this.#source!.duration - duration) < 0.001)) this.#source!.duration = duration;
  }

  get #end(): number {
    const ranges = this.#buffer!.buffered;
    return ranges.length ? ranges.end(ranges.length - 1) : 0;
  }

  // The first segment that the playhead needs soon and the buffer has not; null: none.
  #next(): Segment | null {
    const at = this.#video.currentTime;
    return this.#segments.find(({ start, end }) => end > at && start < at + AHEAD_S && !this.#has((start + end) / 2)) ?? null;
  }

  #has(seconds: number): boolean {
    const ranges = this.#buffer?.buffered ?? ([] as unknown as TimeRanges);
    for (let n = 0; n < ranges.length; n++) {
      if (ranges.start(n) <= seconds && seconds < ranges.end(n)) return true;
    }
    return false;
  }

  async #append({ name, init, offset }: Segment): Promise<void> {
    if (init !== this.#init) {
      const data = await this.#recording.item(init);
      if (this.#isClosed) return;
      this.#prepare(mimeOf(data));
      await this.#put(data);
      this.#init = init;
    }
    const data = await this.#recording.item(name);
    if (this.#isClosed) return;
    this.#buffer!.timestampOffset = offset;
    if (this.#video.currentTime > BEHIND_S) await this.#remove(0, this.#video.currentTime - BEHIND_S);
    await this.#put(data);
    this.#extend();
  }

  #prepare(mime: string): void {
    if (this.#buffer) return this.#buffer.changeType(mime);
    this.#buffer = this.#source!.addSourceBuffer(mime);
    this.#buffer.mode = "segments";
    // The element shows the first frame, and its length.
    this.#extend();
  }

  async #put(data: ArrayBuffer): Promise<void> {
    if (this.#isClosed) return;
    try {
      this.#buffer!.appendBuffer(data);
    } catch (error) {
      if ((error as Error).name !== "QuotaExceededError") throw error;
      const at = this.#video.currentTime;
      await this.#remove(0, Math.max(0, at - 1));
      await this.#remove(at + AHEAD_S, Infinity);
      this.#buffer!.appendBuffer(data);
    }
    await this.#updated();
  }

  async #remove(start: number, end: number): Promise<void> {
    if (this.#isClosed || end <= start || !this.#buffer!.buffered.length || this.#buffer!.buffered.start(0) >= end) return;
    this.#buffer!.remove(start, end);
    await this.#updated();
  }

  #updated(): Promise<void> {
    return new Promise<void>((resolve) => {
      if (!this.#buffer!.updating) resolve();
      else this.#buffer!.addEventListener("updateend", resolve as () => void, { once: true });
    });
  }

  #news(): Promise<void> {
    return new Promise<void>((resolve) => {
      const timer = this.#isComplete ? null : setTimeout(resolve, LOOK_MS);
      this.#awaited = () => {
        clearTimeout(timer!);
        resolve();
      };
    });
  }

  #fail(cause: Error): void {
    if (this.#isClosed) return;
    this.close();
    const isOwn = cause instanceof TurboServeError;
    this.#onError(isOwn ? cause : new PlaybackError(`this browser cannot play the recording: ${cause.message}`, { cause }));
  }
}

/** Read an HLS media playlist of the gateway. Times are seconds of the whole recording. */
export function segmentsOf(playlist: string): { segments: Segment[]; isComplete: boolean } {
  const segments: Segment[] = [];
  let init = "", offset = 0, at = 0, duration = 0;
  for (const line of playlist.split("\n")) {
    const map = /^#EXT-X-MAP:URI="([^"]+)"/.exec(line);
    const length = /^#EXTINF:([0-9.]+),/.exec(line);
    if (map) {
      // Each part begins at 0.
      [, init] = map as unknown as [string, string];
      offset = at;
    } else if (length) duration = Number(length[1]);
    else if (line && !line.startsWith("#")) {
      segments.push({ name: line, init, offset, start: at, end: at + duration });
      at += duration;
    }
  }
  return { segments, isComplete: playlist.includes("#EXT-X-ENDLIST") };
}

// From the profile, constraints and level of the init segment's `avcC` box (ISO/IEC 14496-15, 5.3.3.1).
function mimeOf(init: ArrayBuffer): string {
  const bytes = new Uint8Array(init);
  const box = [..."avcC"].map((letter) => letter.charCodeAt(0));
  const at = bytes.findIndex((_, n) => box.every((code, place) => bytes[n + place] === code));
  if (at < 0) throw new TypeError("the init segment has no avcC box");
  const codec = Array.from(bytes.subarray(at + 5, at + 8), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return `video/mp4; codecs="avc1.${codec}"`;
}
