"""Airflow side of Coral: policies, operators, triggers and the UI page. Holds no planning logic."""
