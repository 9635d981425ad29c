# Stands for python:3.11-slim-bookworm.
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3.11 python3.11-venv libpython3.11 \
    && rm -rf /var/lib/apt/lists/* && ln -s /usr/bin/python3.11 /usr/local/bin/python
ENV PATH=/usr/local/bin:$PATH
CMD ["python"]
