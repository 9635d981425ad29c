# Stands for prom/prometheus.
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends prometheus wget && rm -rf /var/lib/apt/lists/* \
    && install -d -o nobody -g nogroup -m 775 /prometheus
USER nobody
VOLUME /prometheus
ENTRYPOINT ["prometheus"]
