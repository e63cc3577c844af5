import type { TurboServeError } from "./errors.js";
import type { LivePlayback } from "./live_playback.js";
import type { Activity, ChunkFidelity, ChunkMessage, ControlReceipt, End, Hello, Init, Phase, Receipt, SessionEvent, SessionInfo, Skip, Tier } from "./models.js";
import type { Playback } from "./playback.js";
import type { Session } from "./session.js";
/** What `promptId` is in `promptshown` for the prompt that the session was created with. */
export declare const FIRST_PROMPT = "first";
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
    sessionevent: {
        event: SessionEvent;
        isNew: boolean;
    };
    statechange: SessionState;
    promptapplied: SessionEvent;
    controlapplied: SessionEvent;
    controlshown: {
        index: number;
        name: string;
        value: unknown;
        controlId: string;
        seconds: number | null;
    };
    promptshown: {
        index: number;
        prompt: string;
        promptId: string;
        seconds: number | null;
    };
    quality: {
        chunk: number;
        tier: Tier | null;
        slack_s: number | null;
        credit_s: number | null;
        fidelity: ChunkFidelity | null;
    };
    playback: {
        started: boolean;
        stalled: boolean;
    };
    stall: {
        stalled: boolean;
    };
    reconnecting: {
        waitMs: number;
    };
    end: End;
    error: {
        error: TurboServeError;
        isFinal: boolean;
    };
    transport: {
        transport: Transport;
    };
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
export declare class PlayedSession {
    #private;
    readonly session: Session;
    state: SessionState;
    chunk: ChunkMessage | null;
    connected: boolean;
    ended: End | null;
    transport: Transport | null;
    /**
     * `createdAtMs`: when the user asked for this new session, or null. `transport`: if WebRTC fails, it is
     * `websocket`.
     */
    constructor(session: Session, playbacks: Playbacks, emit: Emit, createdAtMs: number | null, transport: Transport);
    /** The playback in use. */
    get playback(): Playback | LivePlayback;
    /** Continue over another transport, at the session's playhead. */
    use(transport: Transport): void;
    close(): void;
    /** Playback shows its first frame. */
    firstFrame(): void;
    prompt(prompt: string, options?: PromptOptions): Promise<Receipt>;
    setControl(name: string, value: unknown, options?: PromptOptions): Promise<ControlReceipt>;
    pause(): Promise<SessionInfo>;
    resume(): Promise<SessionInfo>;
}
export {};
