"""Runs in progress: each run's driver, and the path of the run's batches from deposit to result.

    routes -> Coordinator -> Drivers -> Driver --> BatchExchange -> ShufflerClient, Analyzer
                                          |`-----> RunLearner ----> Learner, Issuer
                                          `------> Store

One turn of a `Driver` reads the run's first unfinished deployment from the `Store`. The turn does
the step that the deployment's state needs:

- issued: ``exchange.deposit``, then ``store.record_deposit``;
- open: ``exchange.wait_until_full``, then ``store.record_seal``;
- sealed: ``exchange.fetch_and_open``, then ``learner.complete`` (observe the counts, issue the next
  deployment), then ``store.settle`` (commit spend, counts, results and next deployment);
- counted or rejected: ``exchange.acknowledge``, then ``store.record_acknowledgement``.

Every step may be repeated, so a crash costs at most one step. If a step fails, ``Driver._attempt``
issues the deployment again, tries the step later, or fails the run.
"""
