import type {
  Activity, ChunkFidelity, ChunkMessage, Client, ControlReceipt, CreateOptions, End, Hello, Init, Phase, Receipt, Session, SessionEvent,
  SessionInfo, Skip, Tier, TurboServeError,
} from "./index.js";

/** `promptId` of the prompt that the session was created with. */
export const FIRST_PROMPT: "first";

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
  transport: { transport: "websocket" | "webrtc" };
}

/** `<turboserve-player>`: plays one session. Attributes: `base-url` and `session`, or `src`; `transport`. */
export class TurboServePlayer extends HTMLElement {
  key: string;
  client: Client;
  transport: "websocket" | "webrtc";
  readonly session: Session | null;
  readonly state: SessionState | null;
  readonly chunk: ChunkMessage | null;
  readonly connected: boolean;
  readonly ended: End | null;
  readonly video: HTMLVideoElement | null;
  readonly supported: boolean;
  readonly started: boolean;
  readonly stalled: boolean;
  readonly playhead: number;
  readonly buffered: number;
  create(prompt: string, options?: CreateOptions): Promise<Session>;
  open(id: string, options?: { createdAtMs?: number | null }): void;
  close(): void;
  prompt(prompt: string, options?: { dropBuffer?: boolean }): Promise<Receipt>;
  setControl(name: string, value: unknown, options?: { dropBuffer?: boolean }): Promise<ControlReceipt>;
  pause(): Promise<SessionInfo>;
  resume(): Promise<SessionInfo>;
  end(): Promise<SessionInfo>;
  addEventListener<Name extends keyof PlayerEventDetails>(
    type: Name,
    listener: (event: CustomEvent<PlayerEventDetails[Name]>) => void,
    options?: boolean | AddEventListenerOptions,
  ): void;
  addEventListener(
    type: string,
    listener: EventListenerOrEventListenerObject,
    options?: boolean | AddEventListenerOptions,
  ): void;
}

declare global {
  interface HTMLElementTagNameMap {
    "turboserve-player": TurboServePlayer;
  }
}
