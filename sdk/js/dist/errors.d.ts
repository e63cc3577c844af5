export declare class TurboServeError extends Error {
    constructor(message?: string, options?: ErrorOptions);
}
/** The gateway did not answer, also after all attempts. A request may have taken effect. */
export declare class GatewayUnreachableError extends TurboServeError {
    readonly code = "unreachable";
    readonly status = 0;
}
/** The gateway's messages are not those of this client's protocol version. */
export declare class ProtocolError extends TurboServeError {
    readonly code = "protocol";
}
/** The browser cannot play the video: it refused the format or a fragment. `cause`: the browser's own error. */
export declare class PlaybackError extends TurboServeError {
    readonly code = "playback";
}
/** One invalid input of a request. */
export interface InvalidInput {
    field: string;
    message: string;
    limit?: unknown;
}
/** A refusal as the gateway sent it (RFC 9457). */
export interface Problem {
    title?: string;
    detail?: string;
    status?: number;
    code?: string;
    field?: string | null;
    limit?: unknown;
    errors?: InvalidInput[];
    retry_after_s?: number | null;
    request_id?: string | null;
}
/** What is known of the refused request. */
export interface RefusedRequest {
    /** Status of the answer, if the problem itself has none. */
    status?: number;
    /** API key of the request. Empty: it had none. */
    key?: string;
}
/** The gateway refused a request (RFC 9457). */
export declare class ProblemError extends TurboServeError {
    #private;
    readonly status: number;
    /** Stable name of the problem, such as `invalid_input`. */
    readonly code: string;
    readonly detail: string;
    /** Input at fault. */
    readonly field: string | null;
    /** Bound that the input met. */
    readonly limit: unknown;
    /** All invalid inputs. */
    readonly errors: InvalidInput[];
    /** Time after which a retry may succeed, seconds. Null: a retry does not help. */
    readonly retryAfterS: number | null;
    /** Id of the request in the logs of the services. Null: an earlier gateway, or a refused connection. */
    readonly requestId: string | null;
    constructor(problem: Problem, { status, key }?: RefusedRequest);
    /** Whether the request had an API key: a wrong key and a missing one have the same code. */
    get hadKey(): boolean;
    /** Whether the request was sent with this API key. Empty: without one. The key itself is not readable. */
    wasSentWith(key: string): boolean;
}
/** The key is missing, wrong or revoked. */
export declare class UnauthorizedError extends ProblemError {
}
/** There is no such session, or another tenant owns it. */
export declare class NotFoundError extends ProblemError {
}
/** The deployment or the tenant's limit is full. `retryAfterS` has the time to wait, if it is known. */
export declare class NoCapacityError extends ProblemError {
}
/** The log does not have the next chunk any more. The video continues at the chunk `continuesAt`. */
export declare class ChunkGoneError extends ProblemError {
    get continuesAt(): number;
}
/** Return the error of a problem, by its status and code. */
export declare function problemError(problem: Problem, sent?: RefusedRequest): ProblemError;
