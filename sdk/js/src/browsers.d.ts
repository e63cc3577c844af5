// What some browsers have and TypeScript does not declare.

/** `MediaSource` of Safari on phones. */
declare var ManagedMediaSource: typeof MediaSource | undefined;
