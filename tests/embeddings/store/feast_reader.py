"""Run by the interpreter of Feast's own environment: what a feature repository serves of some ids, as JSON.

python feast_reader.py FOLDER VIEW ENTITY IDS-AS-JSON
"""

import json
import sys
from datetime import UTC, datetime, timedelta

from feast import FeatureStore

folder, view, entity, ids = sys.argv[1:]
ids = json.loads(ids)
store = FeatureStore(repo_path=folder)
now = datetime.now(UTC)
store.materialize(now - timedelta(days=365), now + timedelta(minutes=1))
answer = store.get_online_features(
    features=[f"{view}:vector", f"{view}:status"], entity_rows=[{entity: one} for one in ids]
).to_dict()
definition = store.get_feature_view(view)
print(
    json.dumps(
        {"answer": answer, "tags": dict(definition.tags), "ttl_seconds": definition.ttl.total_seconds()}, default=str
    )
)
