import { Recording } from "./recording.js";
import { VideoStream } from "./video_stream.js";
import type { Client } from "./client.js";
import type { ControlReceipt, Decision, Link, Migration, NewLink, Quality, Receipt, Role, SessionInfo, Ticket } from "./models.js";
import type { WatchOptions } from "./video_stream.js";
/** One session of a client. */
export declare class Session {
    #private;
    readonly client: Client;
    readonly id: string;
    /** As the gateway last described the session; null: not read yet. */
    info: SessionInfo | null;
    /** `info`: as the gateway last described the session; null: not read yet. */
    constructor(client: Client, id: string, info?: SessionInfo | null);
    /** Address of the video as one MP4 file, for other players. It has no key. */
    get videoUrl(): string;
    /** Read the session. */
    refresh(): Promise<SessionInfo>;
    /**
     * Change the prompt from the next chunk on. `prompt.applied` with the receipt's `prompt_id` follows, or
     * `prompt.superseded`. `dropBuffer`: viewers discard the video that they have not shown, and skip to the
     * first chunk that shows the prompt.
     */
    prompt(prompt: string, { dropBuffer }?: {
        dropBuffer?: boolean;
    }): Promise<Receipt>;
    /**
     * Set one of the model's controls (`Client.models`) from the next chunk on. `control.applied` with the receipt's
     * `control_id` follows, or `control.superseded`. Null: the model's own. `dropBuffer`: as for `prompt`.
     */
    setControl(name: string, value: unknown, { dropBuffer }?: {
        dropBuffer?: boolean;
    }): Promise<ControlReceipt>;
    /** Change limits of the session from the next chunk on. What is left out stays; null sets the default. */
    change({ quality, maxLeadS }: {
        quality?: Quality | null;
        maxLeadS?: number | null;
    }): Promise<SessionInfo>;
    /** Stop generation, free the slot, keep the state. A repeat gets the same answer. */
    pause(): Promise<SessionInfo>;
    /** Continue where the session stopped. A repeat gets the same answer. */
    resume(): Promise<SessionInfo>;
    /** End the session for good. A repeat gets the same answer. */
    end(): Promise<SessionInfo>;
    /** Migrate the session to `worker`. Empty: the scheduler chooses. The video goes on. */
    migrate(worker?: string): Promise<Migration>;
    /** List what the scheduler decided about the session, oldest first. */
    decisions(): Promise<Decision[]>;
    /**
     * Create a ticket for the session's streams. It opens streams for about a minute: `?ticket=` in the address of
     * the WebSocket, `stream.mp4` or `events`. `role`: `viewer` or `controller`; by default what the key allows.
     */
    ticket({ role }?: {
        role?: Role;
    }): Promise<Ticket>;
    /**
     * Create a link to the session. Its `token` is the `key` of a client that may use this session only.
     * `expiresAt`: a Date; by default after the gateway's lifetime of links.
     */
    share({ role, expiresAt, label, }?: {
        role?: Role;
        expiresAt?: Date;
        label?: string;
    }): Promise<NewLink>;
    /** List the session's links that have not expired, newest first, without their tokens. */
    links(): Promise<Link[]>;
    /** Revoke a link. The streams that it has opened end within a few seconds. A repeat gets the same answer. */
    revokeLink(link: string): Promise<Link>;
    /** Record the session from the next chunk on. A session that is recorded already returns its recording. */
    startRecording(): Promise<Recording>;
    /** Stop recording. The session goes on, and what was recorded stays. A repeat gets the same recording. */
    stopRecording(): Promise<Recording>;
    /** List the session's recordings, newest first. */
    recordings(): AsyncGenerator<Recording, void, void>;
    /** Return the session's chunks, events and skips, to be read with `for await`. See `VideoStream`. */
    watch(options?: WatchOptions): VideoStream;
}
