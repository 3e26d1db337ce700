"""AWS as storage, ingestion and provisioning use it.

API: ``aws.make_client``, ``aws.aws_call`` (a guard around calls), ``aws.aws_entries`` (all pages of a listing).
"""
