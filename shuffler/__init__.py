"""The shuffler: the only service that nodes talk to.

For each batch, the shuffler collects reports until n different users have reported. It removes the
reports' outer seals, permutes all messages of the batch and hands them to the analyzer. The
shuffler never sees a plaintext message, and the analyzer never sees who sent which message or when.
If the batch's aggregation is ``sums``, each report is a public key and a masked vector. For such a
batch, the shuffler hands over the sum of all vectors and the permuted keys.

The path of a report:

    node -> app.upload -> core.Admission (node and batch) -> core.Shuffler.upload
         -> core._open_reports (outer seals, key from store.vault)
         -> store.committer -> store.leasing.store_reports (rules decide which reports to accept;
            one transaction marks their leases, stores them encrypted and seals a full batch)
         -> store.report_rows, for a batch of sums (adds the vectors, stores the keys)
    coordinator -> app.messages -> lifecycle.release -> permutation.permute_messages
         -> store.batch_rows.mark_forwarded (the digest of the bytes) -> the permuted messages
    coordinator -> app.acknowledge -> lifecycle.tidy -> secret destroyed, reports deleted

``rules`` and ``states`` only decide; they change nothing. ``store`` keeps the durable state; all
writes go through ``store.committer``. ``lifecycle`` orders the steps of a batch's life. ``metrics``
counts the work and decides who may see the counts. ``core`` joins the parts, ``callers`` tells
callers apart, and ``app`` translates HTTP.
"""

if not __name__.startswith("riffle."):
    raise ImportError(f"import riffle.{__name__} instead of {__name__}")
