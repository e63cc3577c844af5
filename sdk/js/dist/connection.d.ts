import { ProblemError } from "./errors.js";
import type { TurboServeError } from "./errors.js";
import type { ChunkMessage, End, Hello, Init, SessionEvent, Skip } from "./models.js";
import type { Session } from "./session.js";
export interface ConnectionOptions {
    /** Index of the last chunk that the caller has; -1: from the beginning. By default from the playhead on. */
    after?: number;
    /** Number of the last event that the caller has; 0: all that are kept. By default new ones. */
    eventsAfter?: number;
    /** Whether to continue behind chunks that are not kept any more. */
    skipLost?: boolean;
    /** Time without a connection after which it gives up, seconds. */
    reconnectWithinS?: number;
}
/** Get the gateway's messages. Those that are left out are not called. */
export interface ConnectionHandlers {
    hello?(message: Hello): void;
    init?(message: Init, data: ArrayBuffer): void;
    chunk?(message: ChunkMessage, data: ArrayBuffer): void;
    skip?(message: Skip): void;
    /** `isNew`: the event is none of the history that the connection began with. */
    event?(message: SessionEvent, isNew: boolean): void;
    end?(message: End): void;
    /** The stream continues. */
    problem?(error: ProblemError): void;
    /** The connection is lost. The next attempt follows after `waitMs`. */
    lost?(waitMs: number): void;
    /** The stream has ended without the session's end. */
    gone?(error: TurboServeError): void;
}
/** The WebSocket of one session, across broken connections. The caller reports the playhead. */
export declare class StreamConnection {
    #private;
    readonly session: Session;
    /** Index of the last chunk that came; null: none yet, and the stream begins at the playhead. */
    lastIndex: number | null;
    /** Connects at once. */
    constructor(session: Session, on: ConnectionHandlers, { after, eventsAfter, skipLost, reconnectWithinS }?: ConnectionOptions);
    close(): void;
    /** Send a message, if the connection is open. */
    send(message: object): void;
    /** Report the playhead: the worker generates only a few seconds ahead of it. */
    report(playheadS: number, bufferedS?: number): void;
}
