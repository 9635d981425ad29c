{{- define "evenkeel.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "evenkeel.labels" -}}
app.kubernetes.io/name: evenkeel
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "evenkeel.metadata" -}}
name: {{ .root.Release.Name }}-{{ .component }}
labels:
  {{- include "evenkeel.labels" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "evenkeel.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "evenkeel.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{- define "evenkeel.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "evenkeel.env" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "evenkeel.homeClaim" -}}
{{ .Values.home.existingClaim | default (printf "%s-home" .Release.Name) }}
{{- end }}

{{- define "evenkeel.postgresHost" -}}
{{- if .Values.postgresql.enabled -}}
{{ .Release.Name }}-postgresql
{{- else -}}
{{ required "postgresql.host: with postgresql.enabled=false name the external one" .Values.postgresql.host }}
{{- end }}
{{- end }}

{{- define "evenkeel.storeEnv" -}}
{{- if .Values.storeUrl }}
- {name: EVENKEEL_STORE_URL, value: {{ .Values.storeUrl | quote }}}
{{- else if .Values.redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.existingSecret }}, key: {{ .Values.redis.secretKey }}}}
- {name: EVENKEEL_STORE_URL, value: "redis://:$(REDIS_PASSWORD)@{{ .Release.Name }}-redis:6379/0"}
{{- end }}
{{- end }}

{{- define "evenkeel.dataMounts" -}}
{{- range .Values.data }}
- {name: data-{{ .name }}, mountPath: /data/{{ .name }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "evenkeel.volumes" -}}
- name: home
  persistentVolumeClaim: {claimName: {{ include "evenkeel.homeClaim" . }}}
- {name: tmp, emptyDir: {}}
{{- range .Values.data }}
- name: data-{{ .name }}
  persistentVolumeClaim: {claimName: {{ .claim }}, readOnly: true}
{{- end }}
{{- end }}

{{- /* A pod of a run's cluster: neither the database's password nor the service's keys, and no access to Kubernetes. */}}
{{- define "evenkeel.rayPod" -}}
{{- $root := .root }}
metadata:
  labels:
    {{- include "evenkeel.labels" (dict "root" $root "component" "run") | nindent 4 }}
spec:
  automountServiceAccountToken: false
  securityContext: {{- include "evenkeel.podSecurity" $root | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "evenkeel.placement" .group | nindent 2 }}
  containers:
    - name: {{ .name }}
      image: {{ include "evenkeel.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext: {{- include "evenkeel.containerSecurity" $root | nindent 8 }}
      resources: {{- toYaml .group.resources | nindent 8 }}
      env:
        - {name: HOME, value: /tmp}
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
        - {name: RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING, value: "0"}
        {{- include "evenkeel.env" $root.Values.runs.env | nindent 8 }}
      {{- with $root.Values.storeSecret }}
      envFrom:
        - secretRef: {name: {{ . }}}
      {{- end }}
      volumeMounts:
        - {name: home, mountPath: /var/lib/evenkeel/runs, subPath: runs}
        - {name: home, mountPath: /var/lib/evenkeel/store, subPath: store}
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        {{- include "evenkeel.dataMounts" $root | nindent 8 }}
  volumes:
    {{- include "evenkeel.volumes" $root | nindent 4 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $root.Values.runs.sharedMemory }}}
{{- end }}

{{- define "evenkeel.rayWorkers" -}}
groupName: {{ .name }}
replicas: {{ .replicas }}
minReplicas: {{ .replicas }}
maxReplicas: {{ .maxReplicas }}
rayStartParams: {object-store-memory: "268435456"}
template: {{- include "evenkeel.rayPod" (dict "root" .root "name" "ray-worker" "group" .group) | nindent 2 }}
{{- end }}

{{- /* The RayClusterSpec of runs: of each run's own cluster, or of the shared cluster. */}}
{{- define "evenkeel.rayClusterSpec" -}}
{{- $runs := .root.Values.runs }}
rayVersion: {{ $runs.rayVersion }}
headGroupSpec:
  rayStartParams: {num-cpus: "0", object-store-memory: "268435456", dashboard-host: "0.0.0.0"}
  template: {{- include "evenkeel.rayPod" (dict "root" .root "name" "ray-head" "group" $runs.head) | nindent 4 }}
workerGroupSpecs:
  - {{- include "evenkeel.rayWorkers" (dict "root" .root "name" "cpu" "group" $runs.cpu "replicas" .replicas "maxReplicas" .maxReplicas) | nindent 4 }}
  {{- if $runs.gpu.enabled }}
  - {{- include "evenkeel.rayWorkers" (dict "root" .root "name" "gpu" "group" $runs.gpu "replicas" .replicas "maxReplicas" .maxReplicas) | nindent 4 }}
  {{- end }}
{{- end }}
