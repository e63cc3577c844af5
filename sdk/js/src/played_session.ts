// One session on a screen: its stream, its playback, and what of it the viewer sees.

import { StreamConnection } from "./connection.js";
import { ShownPrompts } from "./shown_prompts.js";
import { WebRtcConnection } from "./webrtc_connection.js";
import type { TurboServeError } from "./errors.js";
import type { LivePlayback } from "./live_playback.js";
import type {
  Activity, ChunkFidelity, ChunkMessage, ControlReceipt, End, Hello, Init, Phase, Receipt, SessionEvent, SessionInfo, Skip, Tier,
} from "./models.js";
import type { Playback } from "./playback.js";
import type { Session } from "./session.js";

/** What `promptId` is in `promptshown` for the prompt that the session was created with. */
export const FIRST_PROMPT = "first";

export interface SessionState {
  phase: Phase | null;
  activity: Activity | null;
  epoch: number;
  worker: string | null;
  target: string | null;
  /** Number of the newest event that this state reflects. */
  newestEvent: number;
}

/** Event of the element → its `detail`. */
export interface PlayerEventDetails {
  hello: Hello;
  format: Init;
  chunk: ChunkMessage;
  skip: Skip;
  sessionevent: { event: SessionEvent; isNew: boolean };
  statechange: SessionState;
  promptapplied: SessionEvent;
  controlapplied: SessionEvent;
  controlshown: { index: number; name: string; value: unknown; controlId: string; seconds: number | null };
  promptshown: { index: number; prompt: string; promptId: string; seconds: number | null };
  quality: {
    chunk: number;
    tier: Tier | null;
    slack_s: number | null;
    credit_s: number | null;
    fidelity: ChunkFidelity | null;
  };
  playback: { started: boolean; stalled: boolean };
  stall: { stalled: boolean };
  reconnecting: { waitMs: number };
  end: End;
  error: { error: TurboServeError; isFinal: boolean };
  transport: { transport: Transport };
}

/** Reports an event of the element. */
export type Emit = <Name extends keyof PlayerEventDetails>(type: Name, detail: PlayerEventDetails[Name]) => void;

/** How video comes. */
export type Transport = "websocket" | "webrtc";

/** The playback of each transport. */
export interface Playbacks {
  websocket: Playback;
  webrtc: LivePlayback;
}

interface PromptOptions {
  dropBuffer?: boolean;
}

const ENDED = new Set<Phase>(["terminated", "failed"]);
const NO_STATE: SessionState = { phase: null, activity: null, epoch: 0, worker: null, target: null, newestEvent: 0 };

export class PlayedSession {
  readonly session: Session;
  state = NO_STATE;
  chunk: ChunkMessage | null = null;
  connected = false;
  ended: End | null = null;
  transport: Transport | null = null;

  #playbacks: Playbacks;
  #playback!: Playback | LivePlayback;
  #emit: Emit;
  #connection: StreamConnection | WebRtcConnection | null = null;
  #eventsAfter = 0;
  #shown = new ShownPrompts<string>((shown) => this.#emit("promptshown", shown));
  #shownControls = new ShownPrompts<{ name: string; value: unknown }>(({ index, prompt: { name, value }, promptId, seconds }) => {
    this.#emit("controlshown", { index, name, value, controlId: promptId, seconds });
  });
  #quality = "";
  #timer = 0;
  #frame = 0;
  #closed = false;
  #isPausing = false;

  /**
   * `createdAtMs`: when the user asked for this new session, or null. `transport`: if WebRTC fails, it is
   * `websocket`.
   */
  constructor(session: Session, playbacks: Playbacks, emit: Emit, createdAtMs: number | null, transport: Transport) {
    this.session = session;
    this.#playbacks = playbacks;
    this.#emit = emit;
    if (createdAtMs !== null) this.#shown.sent(FIRST_PROMPT, createdAtMs);
    this.use(transport);
    this.#look();
  }

  /** The playback in use. */
  get playback(): Playback | LivePlayback {
    return this.#playback;
  }

  /** Continue over another transport, at the session's playhead. */
  use(transport: Transport): void {
    if (this.#closed || this.ended || transport === this.transport) return;
    const wanted = this.#playback?.wanted ?? true;
    this.#connection?.close();
    clearInterval(this.#timer);
    for (const one of Object.values(this.#playbacks)) one.release();
    this.transport = transport;
    this.#playback = this.#playbacks[transport];
    this.#playback.reset();
    if (wanted) this.#playback.play();
    else this.#playback.pause();
    const options = { eventsAfter: this.#eventsAfter };
    this.#connection =
      transport === "webrtc"
        ? new WebRtcConnection(this.session, this.#handlers(), options)
        : new StreamConnection(this.session, this.#handlers(), { ...options, skipLost: true });
    this.#emit("transport", { transport });
  }

  close(): void {
    this.#closed = true;
    this.#emit = () => {};
    this.#connection!.close();
    clearInterval(this.#timer);
    cancelAnimationFrame(this.#frame);
  }

  /** Playback shows its first frame. */
  firstFrame(): void {
    this.#connection!.send({ type: "first_frame" });
  }

  async prompt(prompt: string, options?: PromptOptions): Promise<Receipt> {
    const sentAtMs = performance.now();
    const receipt = await this.session.prompt(prompt, options);
    this.#shown.sent(receipt.prompt_id, sentAtMs);
    return receipt;
  }

  async setControl(name: string, value: unknown, options?: PromptOptions): Promise<ControlReceipt> {
    const sentAtMs = performance.now();
    const receipt = await this.session.setControl(name, value, options);
    this.#shownControls.sent(receipt.control_id, sentAtMs);
    return receipt;
  }

  async pause(): Promise<SessionInfo> {
    this.#playback.pause();
    this.#isPausing = true;
    try {
      return this.#answered(await this.session.pause());
    } finally {
      this.#isPausing = false;
      // It was refused, or the session was resumed meanwhile.
      if (!this.#closed && this.state.activity === "watching") this.#playback.play();
    }
  }

  async resume(): Promise<SessionInfo> {
    return this.#answered(await this.session.resume());
  }

  #handlers() {
    return {
      hello: (message: Hello) => this.#greeted(message),
      init: (message: Init, data: ArrayBuffer | null) => {
        this.#playback.init(message, data!);
        this.#emit("format", message);
      },
      skip: (message: Skip) => {
        this.#playback.skip(message.start_s);
        this.#emit("skip", message);
      },
      chunk: (message: ChunkMessage, data: ArrayBuffer | null) => this.#received(message, data),
      track: (track: MediaStreamTrack) => (this.#playback as LivePlayback).track(track),
      unavailable: () => this.use("websocket"),
      event: (message: SessionEvent, isNew: boolean) => {
        this.#eventsAfter = message.sequence;
        if (message.type === "prompt.applied") {
          this.#shown.applied(message.chunk_index as number, message.prompt as string, message.prompt_id as string);
          this.#emit("promptapplied", message);
        }
        if (message.type === "control.applied") {
          const { chunk_index, name, value = null, control_id } = message;
          this.#shownControls.applied(chunk_index as number, { name: name as string, value }, control_id as string);
          this.#emit("controlapplied", message);
        }
        this.#emit("sessionevent", { event: message, isNew });
        if (isNew) this.#learn(message, message.sequence);
      },
      end: (message: End) => {
        this.#playback.finish();
        this.connected = true;
        this.ended = message;
        clearInterval(this.#timer);
        this.state = { ...this.state, phase: message.phase };
        this.#emit("end", message);
      },
      problem: (error: TurboServeError) => this.#emit("error", { error, isFinal: false }),
      lost: (waitMs: number) => {
        this.connected = false;
        this.#emit("reconnecting", { waitMs });
      },
      gone: (error: TurboServeError) => this.#emit("error", { error, isFinal: true }),
    };
  }

  #greeted(message: Hello): void {
    this.connected = true;
    // Of an ended session, a viewer may want to see the same place again.
    if (ENDED.has(message.phase) && this.transport === "webrtc") return this.use("websocket");
    if (((this.#connection as StreamConnection).lastIndex ?? null) === null) this.#playback.beginAt(message.start_s);
    if (message.control_seq === 0) this.#shown.applied(0, message.prompt, FIRST_PROMPT);
    clearInterval(this.#timer);
    this.#timer = setInterval(() => {
      this.#connection!.report(this.#playback.playhead, this.#playback.ahead);
    }, message.report_interval_s * 1000);
    this.#emit("hello", message);
    this.#learn(message, message.newest_event);
  }

  #received(message: ChunkMessage, data: ArrayBuffer | null): void {
    this.chunk = message;
    this.#playback.chunk(message, data!);
    for (const each of [this.#shown, this.#shownControls]) each.chunk(message.index, message.start_s);
    this.#emit("chunk", message);
    const { tier = null, slack_s = null, credit_s = null, fidelity = null } = message;
    const quality = JSON.stringify([tier, fidelity]);
    if (quality === this.#quality) return;
    this.#quality = quality;
    this.#emit("quality", { chunk: message.index, tier, slack_s, credit_s, fidelity });
  }

  #answered(info: SessionInfo): SessionInfo {
    this.#learn(info, info.newest_event);
    return info;
  }

  // `newestEvent`: the newest event that the news reflects. Answers and events overtake each other.
  // An earlier gateway's answers have no number, and are believed.
  #learn(
    { phase, activity, epoch, worker, target }: Hello | SessionEvent | SessionInfo,
    newestEvent = this.state.newestEvent,
  ): void {
    // A late answer: the playback is another session's by now.
    if (this.#closed || newestEvent < this.state.newestEvent) return;
    this.state = { phase, activity, epoch, worker: worker ?? null, target: target ?? null, newestEvent };
    if (activity === "paused") this.#playback.pause();
    // An event may still come before the pause.
    else if (!this.#playback.wanted && !this.#isPausing) this.#playback.play();
    this.#emit("statechange", this.state);
  }

  #look(): void {
    if (this.#closed) return;
    if (this.#playback.started) {
      for (const each of [this.#shown, this.#shownControls]) each.look(this.#playback.playhead);
    }
    this.#frame = requestAnimationFrame(() => this.#look());
  }
}
