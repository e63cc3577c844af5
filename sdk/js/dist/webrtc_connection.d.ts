import type { ConnectionHandlers } from "./connection.js";
import type { TurboServeError } from "./errors.js";
import type { ChunkMessage, Init } from "./models.js";
import type { Session } from "./session.js";
/** Handlers of a `StreamConnection`, without the data of `init` and `chunk`. */
export interface WebRtcHandlers extends Omit<ConnectionHandlers, "init" | "chunk" | "gone"> {
    init?(message: Init, data: null): void;
    chunk?(message: ChunkMessage, data: null): void;
    track?(track: MediaStreamTrack): void;
    /** There is no connection, and a WebSocket may do. */
    unavailable?(error: TurboServeError): void;
}
export declare class WebRtcConnection {
    #private;
    readonly session: Session;
    /**
     * Connects at once. A lost connection is made again once; if there are several gateways, it is tried at each of
     * them. `eventsAfter`: see `StreamConnection`.
     */
    constructor(session: Session, on: WebRtcHandlers, { eventsAfter }?: {
        eventsAfter?: number;
    });
    close(): void;
    /** Send a message, if the connection is open. */
    send(message: object): void;
    /** The gateway knows the playhead: it has sent each frame at its time. */
    report(): void;
}
