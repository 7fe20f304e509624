"""`kvloom chaos`: a live fabric whose parts are killed, hung and cut off while users check every word."""
