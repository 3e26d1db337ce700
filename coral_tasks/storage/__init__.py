"""What is kept: named objects in a folder or on S3, the template library, the runs.

* ``objects.open_store(address) -> ObjectStore``: folder path or ``s3://bucket/prefix``.
* ``library.write_part / find_part / write_version / publish_version``: build and publish.
* ``library.read_current(store, models=None, phases=None) -> Library(manifest, sets)``, ``read_version``,
  ``find_problems``, ``remove_old``.
* ``runs.RunStore``: everything a run read and wrote.
"""
