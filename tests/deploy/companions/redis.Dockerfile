# Redis from Debian's packages, with the user id of the official image.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
WORKDIR /data
EXPOSE 6379
CMD ["redis-server"]
