// Playback of a WebRTC track, which the gateway paces. Times are seconds of media.

import type { ChunkMessage } from "./models.js";

/** A chunk's message and its first frame are sent together. They may arrive in another order, by up to this. */
const TOGETHER_MS = 25;
/** A chunk that says nothing new is announced up to this much later, together with the next ones. */
const ANNOUNCED_LATE_S = 2;
/** Ticks of RTP time per millisecond. */
const RTP_KHZ = 90;
const STALLED_MS = 500;
const LOOK_MS = 250;
const KEPT = 8;

export class LivePlayback {
  constructor(video: HTMLVideoElement, onChange: () => void, onFirstFrame: () => void) {
    this.#video = video;
    this.#onChange = onChange;
    this.#onFirstFrame = onFirstFrame;
  }

  started = false;
  stalled = false;
  playhead = 0;

  #video: HTMLVideoElement;
  #onChange: () => void;
  #onFirstFrame: () => void;
  #wanted = true;
  /** `at`: when its first frame came, by the clock of `performance`. */
  #chunks: (ChunkMessage & { at: number })[] = [];
  #frameAt = 0;
  #timer = 0;
  /** Number of the track whose frames count. */
  #track = 0;

  get supported(): boolean {
    return "RTCPeerConnection" in globalThis;
  }

  /** Nothing is buffered here: the gateway has what comes next. */
  get ahead(): number {
    const newest = this.#chunks.at(-1);
    return newest ? Math.max(0, newest.start_s + newest.duration_s - this.playhead) : 0;
  }

  get wanted(): boolean {
    return this.#wanted;
  }

  reset(): void {
    this.release();
    this.#timer = setInterval(() => this.#look(), LOOK_MS);
  }

  /** Leave the `<video>` to another playback. */
  release(): void {
    clearInterval(this.#timer);
    this.#track += 1;
    this.#chunks = [];
    this.started = this.stalled = false;
    if (this.#video.srcObject) this.#video.srcObject = null;
  }

  track(track: MediaStreamTrack): void {
    const number = (this.#track += 1);
    this.#video.srcObject = new MediaStream([track]);
    const shown = (now: number, { receiveTime }: VideoFrameCallbackMetadata) => {
      if (number !== this.#track) return;
      this.#shown(receiveTime ?? now);
      this.#video.requestVideoFrameCallback(shown);
    };
    if (this.#video.requestVideoFrameCallback) this.#video.requestVideoFrameCallback(shown);
    else this.#video.addEventListener("timeupdate", () => number === this.#track && this.#shown(performance.now()));
    if (this.#wanted) this.#video.play().catch(() => {});
  }

  beginAt(seconds: number): void {
    if (!this.started) this.playhead = seconds;
  }

  init(): void {}

  chunk(message: ChunkMessage): void {
    const at = performance.now() - TOGETHER_MS;
    // Announcements may have waited for this one.
    for (const one of this.#chunks) one.at = Math.min(one.at, at - (message.rtp_time! - one.rtp_time!) / RTP_KHZ);
    this.#chunks = [...this.#chunks.slice(-KEPT), { ...message, at }];
  }

  skip(): void {}

  play(): void {
    this.#wanted = true;
    if (this.#video.srcObject) this.#video.play().catch(() => {});
  }

  // The last frame stays on the screen: a paused session sends no other.
  pause(): void {
    this.#wanted = false;
  }

  finish(): void {
    clearInterval(this.#timer);
    this.stalled = false;
    this.#onChange();
  }

  // A frame is on the screen that was received at `at`, by the clock of `performance`.
  #shown(at: number): void {
    this.#frameAt = performance.now();
    const chunk = this.#chunks.findLast((one) => one.at <= at);
    if (chunk) {
      // The next chunk may have begun without an announcement.
      this.playhead = chunk.start_s + Math.min((at - chunk.at) / 1000, chunk.duration_s + ANNOUNCED_LATE_S);
    }
    if (this.started) return;
    this.started = true;
    this.#onFirstFrame();
    this.#onChange();
  }

  #look(): void {
    this.stalled = this.started && this.#wanted && performance.now() - this.#frameAt > STALLED_MS;
    this.#onChange();
  }
}
