// HTTP requests with retries. A repeated request has the same `Idempotency-Key`, so it takes effect once.
import { GatewayUnreachableError, ProblemError, ProtocolError, problemError } from "./errors.js";
/** Longest time between two attempts, seconds. A gateway that asks for more is not tried again. */
const LONGEST_WAIT_S = 30;
const FIRST_BACKOFF_S = 0.25;
const LONGEST_BACKOFF_S = 4;
/** Time limit of an attempt if there is another gateway. A gateway itself answers within 3 s. */
const ANSWER_S = 4;
/** Statuses of a gateway that does not reach its servers. Another gateway may. */
const AWAY = new Set([503, 504]);
/**
 * Send one request, and repeat it where a repeat is harmless and may succeed.
 *
 * `address`: the address at the gateway in use. A gateway that does not answer is left for the next one, and each
 * of the others gets one attempt more. Returns the JSON of a successful answer; null: it had no body.
 */
export async function request(address, { idempotent, ...options }) {
    const headers = idempotent ? {} : { "Idempotency-Key": randomName() };
    const value = parsed(await answered(address, { ...options, headers, read: (answer) => answer.text() }));
    if (value === undefined)
        throw new ProtocolError(`${options.method} ${address().pathname}: the answer is not JSON`);
    return value;
}
/** As `request`, for an answer of another kind. */
export async function answered(address, { attempts, gateways, ...options }) {
    for (let attempt = 1;; attempt += 1) {
        const gateway = gateways.current;
        const isLimited = gateways.count > 1 && Number.isFinite(options.timeoutS);
        const timeoutS = isLimited ? Math.min(ANSWER_S, options.timeoutS) : options.timeoutS;
        try {
            return await once(address(), { ...options, timeoutS });
        }
        catch (error) {
            const isUnreachable = error instanceof GatewayUnreachableError;
            if (isUnreachable || AWAY.has(error.status))
                gateways.leave(gateway);
            const most = attempts + (isUnreachable ? gateways.count - 1 : 0);
            if (attempt >= most || !isWorthRepeating(error))
                throw error;
            await wait(Math.max(error.retryAfterS ?? 0, backoffS(attempt)));
        }
    }
}
async function once(url, { method, key, body, contentType, timeoutS, headers, read }) {
    const sent = { method, headers: { ...headers } };
    if (Number.isFinite(timeoutS))
        sent.signal = AbortSignal.timeout(timeoutS * 1000);
    if (body !== undefined) {
        sent.body = contentType ? body : JSON.stringify(body);
        sent.headers["Content-Type"] = contentType ?? "application/json";
    }
    if (key)
        sent.headers.Authorization = `Bearer ${key}`;
    let answer, refused;
    try {
        answer = await fetch(url, sent);
        if (answer.ok)
            return await read(answer);
        refused = await answer.text();
    }
    catch (error) {
        throw new GatewayUnreachableError(`${url.origin}: ${error.message}`, { cause: error });
    }
    throw problemError(problemOf(parsed(refused), answer), { status: answer.status, key });
}
function parsed(text) {
    if (!text)
        return null;
    try {
        return JSON.parse(text);
    }
    catch {
        return undefined;
    }
}
// A proxy before the gateway may answer in another format.
function problemOf(value, answer) {
    const problem = typeof value === "object" && value !== null ? value : { title: `${answer.status} ${answer.statusText}` };
    const header = answer.headers.get("Retry-After");
    if (problem.retry_after_s != null || !/^\d+$/.test(header ?? ""))
        return problem;
    return { ...problem, retry_after_s: Number(header) };
}
function isWorthRepeating(error) {
    if (error instanceof GatewayUnreachableError)
        return true;
    if (!(error instanceof ProblemError))
        return false;
    // 504: it is not known whether the request took effect, and the key makes a repeat harmless.
    return error.status === 504 || (error.retryAfterS !== null && error.retryAfterS <= LONGEST_WAIT_S);
}
function backoffS(attempt) {
    return Math.random() * Math.min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** attempt);
}
function wait(seconds) {
    return new Promise((resolve) => setTimeout(resolve, seconds * 1000));
}
// `crypto.randomUUID` needs a secure context, which a page over plain HTTP is not.
function randomName() {
    const bytes = crypto.getRandomValues(new Uint8Array(16));
    return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
