// Errors of the client. All derive from `TurboServeError`.

export class TurboServeError extends Error {
  constructor(message?: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The gateway did not answer, also after all attempts. A request may have taken effect. */
export class GatewayUnreachableError extends TurboServeError {
  readonly code = "unreachable";
  readonly status = 0;
}

/** The gateway's messages are not those of this client's protocol version. */
export class ProtocolError extends TurboServeError {
  readonly code = "protocol";
}

/** The browser cannot play the video: it refused the format or a fragment. `cause`: the browser's own error. */
export class PlaybackError extends TurboServeError {
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
export class ProblemError extends TurboServeError {
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
  #key: string;

  constructor(problem: Problem, { status = 0, key = "" }: RefusedRequest = {}) {
    const code = String(problem.code ?? "unknown");
    const detail = String(problem.detail ?? problem.title ?? status);
    super(`${code}: ${detail}`);
    this.status = problem.status ?? status;
    this.code = code;
    this.detail = detail;
    this.field = problem.field ?? null;
    this.limit = problem.limit ?? null;
    this.errors = problem.errors ?? [];
    this.retryAfterS = problem.retry_after_s ?? null;
    this.requestId = problem.request_id ?? null;
    this.#key = key;
  }

  /** Whether the request had an API key: a wrong key and a missing one have the same code. */
  get hadKey(): boolean {
    return this.#key !== "";
  }

  /** Whether the request was sent with this API key. Empty: without one. The key itself is not readable. */
  wasSentWith(key: string): boolean {
    return this.#key === key;
  }
}

/** The key is missing, wrong or revoked. */
export class UnauthorizedError extends ProblemError {}

/** There is no such session, or another tenant owns it. */
export class NotFoundError extends ProblemError {}

/** The deployment or the tenant's limit is full. `retryAfterS` has the time to wait, if it is known. */
export class NoCapacityError extends ProblemError {}

/** The log does not have the next chunk any more. The video continues at the chunk `continuesAt`. */
export class ChunkGoneError extends ProblemError {
  get continuesAt(): number {
    return Number(this.limit ?? 0);
  }
}

const FULL = new Set(["no_capacity", "tenant_limit", "key_quota", "too_many_streams"]);

/** Return the error of a problem, by its status and code. */
export function problemError(problem: Problem, sent: RefusedRequest = {}): ProblemError {
  const status = problem.status ?? sent.status;
  if (status === 401) return new UnauthorizedError(problem, sent);
  if (status === 404) return new NotFoundError(problem, sent);
  if (status === 410) return new ChunkGoneError(problem, sent);
  if (FULL.has(problem.code!)) return new NoCapacityError(problem, sent);
  return new ProblemError(problem, sent);
}
