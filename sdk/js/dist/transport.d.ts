import type { Gateways } from "./gateways.js";
/** How a request is sent. */
export interface SendOptions {
    method: string;
    /** API key. Empty: none. */
    key: string;
    /** An object is sent as JSON. */
    body?: object | string;
    /** Of a body that is a text, not JSON. */
    contentType?: string;
    /** Attempts at one gateway. */
    attempts: number;
    /** Time limit of one attempt, seconds. */
    timeoutS: number;
    gateways: Gateways;
}
/** `SendOptions` with a reader of the answer. */
export interface ReadOptions<Value> extends SendOptions {
    headers?: Record<string, string>;
    /** Reads a successful answer. */
    read: (answer: Response) => Value | Promise<Value>;
}
/** `SendOptions` of a request that gets JSON. */
export interface JsonOptions extends SendOptions {
    /** Whether a repeat is harmless without an `Idempotency-Key`. */
    idempotent: boolean;
}
/**
 * Send one request, and repeat it where a repeat is harmless and may succeed.
 *
 * `address`: the address at the gateway in use. A gateway that does not answer is left for the next one, and each
 * of the others gets one attempt more. Returns the JSON of a successful answer; null: it had no body.
 */
export declare function request(address: () => URL, { idempotent, ...options }: JsonOptions): Promise<any>;
/** As `request`, for an answer of another kind. */
export declare function answered<Value>(address: () => URL, { attempts, gateways, ...options }: ReadOptions<Value>): Promise<Value>;
