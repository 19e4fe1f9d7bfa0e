/** One step of an episode as it is kept on the device; one random bit stands for the reward. */
export interface KeptStep {
  readonly state: number;
  readonly reward: 0 | 1;
  readonly next: number | null;
}

/** What is kept of an episode. It is erased once the shuffler has decided on the episode's report. */
export interface KeptEpisode {
  readonly lease: string;
  readonly leaseEnds: number;
  /** When the person's time is over (seconds since 1970). */
  readonly ends: number;
  readonly policy: readonly (readonly number[])[];
  /** Null: given up. */
  readonly steps: readonly KeptStep[] | null;
  /** The sealed report, hexadecimal. As soon as the report is sealed, the steps are erased. */
  readonly sealed: string | null;
  readonly batchKey: string | null;
}

/** One person's part in one batch. */
export interface Participation {
  /** The person's id at the shuffler. */
  readonly user: string;
  readonly batch: string;
  /** Seconds since 1970. */
  readonly askedAt: number;
  /** The guarantee under which this person takes part. */
  readonly epsilon: number;
  readonly beta: number;
  /**
   * `asking`: a place was requested; `asked`: the episode may have begun; `accepted`: the report is stored. Any other
   * outcome is a problem: the reason why no report is stored.
   */
  readonly outcome: string;
  readonly episode: KeptEpisode | null;
}

/**
 * The durable list of people, with each person's batch. It keeps people from being asked twice: never erase it.
 * Only one program at a time may use a diary.
 */
export interface Diary {
  /** Returns the newest entry of each person. */
  entries(): Promise<readonly Participation[]>;
  /** Adds or replaces the entries of these people. They are on the disk when this returns. */
  put(entries: readonly Participation[]): Promise<void>;
  close(): Promise<void>;
}

/** A diary in memory, for tests and rehearsals: it forgets whom it asked. */
export function memoryDiary(): Diary {
  const entries = new Map<string, Participation>();
  return {
    entries: () => Promise.resolve([...entries.values()]),
    put: (added) => {
      for (const entry of added) entries.set(entry.user, entry);
      return Promise.resolve();
    },
    close: () => Promise.resolve(),
  };
}
