import { ProtocolError } from "./errors.js";
import type { ConnectionHandlers } from "./connection.js";
import type { Problem, ProblemError } from "./errors.js";
import type { ChunkMessage, End, Hello, Init, SessionEvent, Skip } from "./models.js";
import type { Session } from "./session.js";
/** A problem. With an `id` it answers a message of the client. */
export interface ErrorMessage extends Problem {
    type: "error";
    id?: string;
}
/** What the gateway sends, with the binary data of `init` and `chunk` behind them over a WebSocket. */
export type StreamMessage = Hello | Init | ChunkMessage | Skip | ErrorMessage | End | SessionEvent;
export declare class StreamMessages {
    #private;
    /** Number of the newest event that came, after which a next connection continues; null: none is known. */
    eventsAfter: number | null;
    constructor(session: Session, on: Pick<ConnectionHandlers, "hello" | "event" | "problem">, eventsAfter?: number);
    /** Return the error of a `hello` in another version of the protocol; null: this client knows the version. */
    versionError({ protocol_version: version }: Hello): ProtocolError | null;
    /** Take a `hello` whose version is known. */
    greet(message: Hello): void;
    /** Take an `error`, and return it. With an `id` it answers a message of the client, and the stream continues. */
    problem(message: ErrorMessage, key: string): ProblemError;
    /** Take an event. Answers to messages of the client, and types of a newer gateway, have no number. */
    event(message: SessionEvent): void;
}
