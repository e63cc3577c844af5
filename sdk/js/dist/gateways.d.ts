export declare class Gateways {
    #private;
    /** `urls`: addresses of gateways that serve the same sessions, at least one. */
    constructor(urls: (string | URL)[]);
    /** The address in use, with a slash at its end. */
    get current(): string;
    get count(): number;
    /** Add addresses that a gateway has named. A key that is sent encrypted stays encrypted. */
    learn(urls: string[]): void;
    /** Use the address after `url`, unless another one is in use already. */
    leave(url: string): void;
}
/** Decides when a gateway counts as silent, and when to ping it. Methods take the time in milliseconds. */
export declare class SilenceWatch {
    #private;
    limitMs: number;
    /** The gateway was asked for something: a connection, or the answer to a ping. */
    asked(now: number): void;
    /** A message of the gateway came. `isVideo`: it was a chunk. */
    heard(isVideo?: boolean): void;
    get wantsPing(): boolean;
    isSilent(now: number): boolean;
    /** The gateway was left. The next one gets more time, in case the network is slow. */
    left(): void;
}
