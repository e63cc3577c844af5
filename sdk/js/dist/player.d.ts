import { Client } from "./client.js";
import { FIRST_PROMPT } from "./played_session.js";
import type { CreateOptions } from "./client.js";
import type { ChunkMessage, ControlReceipt, End, Receipt, SessionInfo } from "./models.js";
import type { PlayerEventDetails, SessionState, Transport } from "./played_session.js";
import type { Session } from "./session.js";
export { FIRST_PROMPT };
export type { PlayerEventDetails, SessionState };
/** The events of `PlayerEventDetails` have their types. */
export interface TurboServePlayer {
    addEventListener<Name extends keyof PlayerEventDetails>(type: Name, listener: (event: CustomEvent<PlayerEventDetails[Name]>) => void, options?: boolean | AddEventListenerOptions): void;
    addEventListener(type: string, listener: EventListenerOrEventListenerObject, options?: boolean | AddEventListenerOptions): void;
}
declare global {
    interface HTMLElementTagNameMap {
        "turboserve-player": TurboServePlayer;
    }
}
/**
 * Attributes: `base-url` and `session`, or `src` with the address of a session; `transport`. Property `key`: the
 * API key.
 * A `<video>` inside is used; without one, the element makes one.
 */
export declare class TurboServePlayer extends HTMLElement {
    #private;
    static observedAttributes: string[];
    connectedCallback(): void;
    disconnectedCallback(): void;
    attributeChangedCallback(name: string, before: string | null, now: string | null): void;
    /** API key. It stays out of the document. A key that is set after a refusal opens the session again. */
    get key(): string;
    set key(key: string);
    /** The client that sends the element's requests. A page that has one of its own may set it. */
    get client(): Client;
    set client(client: Client);
    /**
     * How video comes: `websocket`, with a buffer, or `webrtc`, with hardly any. If WebRTC fails, a WebSocket takes
     * its place, and the event `transport` says so.
     */
    get transport(): Transport;
    set transport(transport: Transport);
    /** The session that is open; null: none. */
    get session(): Session | null;
    /** What the gateway last reported: `phase`, `activity`, `epoch`, `worker`, `target`. Null: no session. */
    get state(): SessionState | null;
    /** The newest chunk's header; null: none came yet. */
    get chunk(): ChunkMessage | null;
    /** Whether the stream is connected. */
    get connected(): boolean;
    /** How the session ended; null: it has not. */
    get ended(): End | null;
    /** The `<video>`; null before the element is in a document. */
    get video(): HTMLVideoElement | null;
    /** Whether this browser can play the video. */
    get supported(): boolean;
    /** Whether the first frame was shown. */
    get started(): boolean;
    /** Whether playback waits for video. */
    get stalled(): boolean;
    /** Media time on screen, seconds. */
    get playhead(): number;
    /** Media that can be played without another chunk, seconds. */
    get buffered(): number;
    /** Create a session and play it. `options`: see `Client.create`. */
    create(prompt: string, options?: CreateOptions): Promise<Session>;
    /** Play a session. `createdAtMs`: `performance.now()` when the user asked for it, if it is a new one. */
    open(id: string, { createdAtMs }?: {
        createdAtMs?: number | null;
    }): void;
    /** Leave the session. It is suspended after a while without a viewer; `end` ends it. */
    close(): void;
    /** Change the prompt. `promptapplied` and `promptshown` follow. `options`: see `Session.prompt`. */
    prompt(prompt: string, options?: {
        dropBuffer?: boolean;
    }): Promise<Receipt>;
    /** Set a control. `controlapplied` and `controlshown` follow. `options`: see `Session.setControl`. */
    setControl(name: string, value: unknown, options?: {
        dropBuffer?: boolean;
    }): Promise<ControlReceipt>;
    /** Pause the session for all its viewers. */
    pause(): Promise<SessionInfo>;
    /** Continue a paused session. */
    resume(): Promise<SessionInfo>;
    /** End the session for good. */
    end(): Promise<SessionInfo>;
}
