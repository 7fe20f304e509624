"""Metering: from the end of a request to a usage record that the control service has stored, exactly once.

meter.py      makes the records of ended and of running requests, with their cost
segment.py    records as bytes of a file, of which the end may be torn
spool.py      the files of one producer: appended, fsync'd, bounded
recent.py     the latest records, in memory that outlives the process
writer.py     brings records into the spool, off the event loop, and keeps them in memory while the disk is full;
              how far records have come
forwarder.py  brings the records of one producer to the control service, by a stream in Redis
suspensions.py  when the router did not run, so that clients are believed about what it computed then
orphans.py    finishes the spools of routers that have died
metering.py   all of this together
delivery_witness.py  what clients outside the fabric are sent, counted apart from all of this
"""
