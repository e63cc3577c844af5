import type { ConnectionOptions } from "./connection.js";
import type { ProblemError } from "./errors.js";
import type { ChunkMessage, End, Hello, Init, SessionEvent, Skip } from "./models.js";
import type { Session } from "./session.js";
export interface WatchOptions extends ConnectionOptions {
    /** Gets what the stream survives, such as chunks that are not kept any more. */
    onProblem?: (error: ProblemError) => void;
}
/** A chunk with its fragment, and with the format and init segment that decode it. */
export interface Chunk extends ChunkMessage {
    data: ArrayBuffer;
    format: Init & {
        init: ArrayBuffer;
    };
}
/**
 * Chunks of one session in order, without repetitions, and without gaps except those that it reports.
 *
 * `for await (const item of stream)` gives, by `item.type`: chunks (`chunk`: the header with `data` and
 * `format`), skips (`skip`) and events (`session.placed`, `prompt.applied` and so on). It ends with the session.
 * The playhead is at the chunk that the caller takes next, so a caller that takes no chunk stops the generation.
 */
export declare class VideoStream implements AsyncIterable<Chunk | Skip | SessionEvent> {
    #private;
    readonly session: Session;
    /** State of the session at the newest connection; null before the first. */
    hello: Hello | null;
    /** How the session ended; null: it has not. */
    end: End | null;
    /** `reconnectWithinS` is 60 by default. */
    constructor(session: Session, options?: WatchOptions);
    /** Close the connection. A loop over the stream ends. */
    close(): void;
    [Symbol.asyncIterator](): AsyncGenerator<Chunk | Skip | SessionEvent, void, void>;
}
